"""`docs/options.md` says what the option records say."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from docs.write_options import meanings, parts, reference
from interlace.config import PLAIN_FIELDS, Config
from interlace.passes.pipeline import built_in

MOST_CELL = 240
"""Characters of a cell that can still be read in a table; more goes to the details."""
PAGE = Path(__file__).parents[1] / "docs" / "options.md"


def test_the_page_is_up_to_date(update_golden: bool) -> None:
    if update_golden:
        PAGE.write_text(reference(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == reference(), "run `python -m docs.write_options > docs/options.md`"


@pytest.mark.parametrize("kind", [Config, *built_in()], ids=lambda kind: kind.__name__)
def test_every_option_has_a_meaning_and_a_use(kind: type[msgspec.Struct]) -> None:
    """A docstring says of each option what it does, then `When: ` and when to set it, both in short; more after `Details: `."""
    fields = [field for field in kind.__struct_fields__ if kind is not Config or field in PLAIN_FIELDS]
    said = {field: parts(meanings(kind).get(field, ""))[:2] for field in fields}
    assert not [field for field, cells in said.items() if not all(cells)]
    assert not [field for field, cells in said.items() if max(map(len, cells)) > MOST_CELL]
