"""Dates as a person would type them, and what they mean: input of the demo and the load test."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

TYPED_DATES: Mapping[str, str] = MappingProxyType(
    {
        "3rd of Feb, 1998": "1998-02-03",
        "tuesday 14 october 2031": "2031-10-14",
        "le 7 juillet 2004": "2004-07-07",
        "der 1. Mai 2015": "2015-05-01",
        "May 5th, '98": "1998-05-05",
        "14/10/2031": "2031-10-14",
        "SEPT 9 1989": "1989-09-09",
        "am 23. november 1963": "1963-11-23",
        "29 février 2024": "2024-02-29",
        "2020-12-25": "2020-12-25",
        "sunday, july 20th 1969": "1969-07-20",
        "31.12.99": "1999-12-31",
    }
)
