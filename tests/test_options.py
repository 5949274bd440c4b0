"""`docs/options.md` says what the option records say."""

from __future__ import annotations

from pathlib import Path

from interlace.passes.pipeline import built_in
from interlace.report.options import meanings, reference

PAGE = Path(__file__).parents[1] / "docs" / "options.md"


def test_the_page_is_up_to_date(update_golden: bool) -> None:
    if update_golden:
        PAGE.write_text(reference(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == reference(), "run `python -m interlace.report.options > docs/options.md`"


def test_every_option_has_a_meaning() -> None:
    for kind in built_in():
        assert not [field for field in kind.__struct_fields__ if not meanings(kind).get(field)], kind.name
