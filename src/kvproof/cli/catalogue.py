"""The command ``kvproof faults``."""

import click

from kvproof.cli.outputs import print_text


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
def faults(as_json: bool) -> None:
    """List the deliberate faults, what each breaks, and the stages at which it must first show."""
    import json

    from kvproof.contract.stages import Stage
    from kvproof.faults import catalogue

    entries = [
        {
            "name": fault.name,
            "breaks": fault.breaks,
            "stages": [stage for stage in Stage if stage in fault.stages],
            "scenarios": list(fault.seen_by),
            "classes": list(fault.classes),
        }
        for fault in catalogue()
    ]
    if as_json:
        print_text(f"{json.dumps(entries, indent=2)}\n")
        return
    lines = [f"{entry['name']:25} {entry['breaks']} [{', '.join(entry['stages'])}]\n" for entry in entries]
    print_text("".join(lines))
