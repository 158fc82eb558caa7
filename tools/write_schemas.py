"""Writes the published JSON schemas of report, ledger and sweep from the contract's own types.

Run by ``make schemas``; a test fails when a file is not what this would write.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from kvproof.contract.ledger import End, Header, Step
from kvproof.contract.report import Report
from kvproof.contract.sweep_table import Sweep

FOLDER = Path(__file__).parents[1] / "src" / "kvproof" / "schemas"
TYPES: dict[str, Any] = {
    "report-2.json": Report,
    "ledger-line-2.json": Header | Step | End,
    "sweep-1.json": Sweep,
}
#: Of versions that are still read, and no longer written.
FROZEN = {"ledger-line-1.json", "report-1.json"}


class Strict(GenerateJsonSchema):
    """JSON Schema with our rules: non-finite numbers are strings, no member is unknown, and none is missing.

    A member that came with a minor version may be missing, for older files lack it.
    """

    def float_schema(self, schema: Any) -> dict[str, Any]:
        return {"anyOf": [{"type": "number"}, {"enum": ["nan", "inf", "-inf"]}]}

    def dataclass_schema(self, schema: Any) -> dict[str, Any]:
        made = super().dataclass_schema(schema)
        fields = {field.name: field for field in dataclasses.fields(schema["cls"])}
        made["required"] = sorted(
            name for name in made.get("properties", {}) if "added_in" not in fields[name].metadata
        )
        made["additionalProperties"] = False
        for member in made.get("properties", {}).values():
            member.pop("default", None)
        return made


def schema_text(kind: Any) -> str:
    """Return the schema of a contract type as the file holds it."""
    schema = TypeAdapter(kind).json_schema(schema_generator=Strict)
    schema["$schema"] = Strict.schema_dialect
    return json.dumps(schema, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    for name, kind in TYPES.items():
        (FOLDER / name).write_text(schema_text(kind), "utf-8")
