"""The contract: reports, ledgers and tables as frozen data. Standard library only."""
