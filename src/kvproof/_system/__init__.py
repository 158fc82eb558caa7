"""The operating system: processes, files, memory, threads."""
