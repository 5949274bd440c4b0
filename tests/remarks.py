"""Remarks as tests look at them: their sentences, their rules, and those of stored reports."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from interlace.ir.remarks import Remark
from interlace.passes.base import Context
from interlace.report.remarks import sentence


def sentences(remarks: Iterable[Remark]) -> list[str]:
    return [sentence(each) for each in remarks]


def rules_of(remarks: Iterable[Remark]) -> list[str]:
    return [each.rule for each in remarks]


def applied(context: Context) -> list[Remark]:
    return [each for each in context.remarks if each.kind != "declined"]


def declined(context: Context) -> list[Remark]:
    return [each for each in context.remarks if each.kind == "declined"]


def done_in(report: dict[str, Any]) -> list[Remark]:
    """What a pass did, by its report in JSON."""
    return [each for each in msgspec.convert(report["remarks"], list[Remark]) if each.kind != "declined"]
