"""Price sheets: the prices of operations, as data.

A sheet is a TOML file with a date and a source. The sheets of Twinbus have names (azure-standard,
azure-premium, zero); any other sheet is given by its path.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from decimal import Decimal
from importlib.resources import files
from pathlib import Path
from typing import Any, Self

from twinbus.cost.stages import Stage, is_billed
from twinbus.errors import InvalidArgumentError
from twinbus.limits import MAX_OPERATIONS, MAX_PRICE
from twinbus.values import shown

_LEAST_SHOWN = Decimal("0.0001")
_MILLION = 1_000_000
_GIGABYTE = 2**30
_SMALLEST = Decimal("0.000001")  # amounts in tables are rounded to this
_TEXTS = ("name", "source", "currency")
_COUNTED_PER = ("account", "namespace")


@dataclass(frozen=True, slots=True)
class Tier:
    """The price of a million operations, up to a number of operations per month."""

    up_to: int | None  # None: without a limit
    per_million: Decimal


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceSheet:
    """The prices of namespaces and operations."""

    name: str
    as_of: date
    source: str
    currency: str
    base_per_hour: Decimal = Decimal(0)
    base_per_namespace: bool = False  # otherwise one base charge for all namespaces
    base_units: int = 1
    included: int = 0  # operations per month
    tiers: Sequence[Tier] = ()
    bill_completions: bool = False
    bill_management: bool = True
    bandwidth_per_gigabyte: Decimal = Decimal(0)  # per 2**30 bytes, in every stage

    def bills(self, stage: Stage) -> bool:
        """Return whether operations of a stage are billed."""
        return is_billed(stage, completions=self.bill_completions, management=self.bill_management)

    def billable(self, operations: Mapping[Stage, int]) -> dict[Stage, int]:
        """Return the operations that are billed."""
        return {stage: count for stage, count in operations.items() if self.bills(stage)}

    def price_of(self, operations: int) -> Decimal:
        """Return the price of this number of billed operations in a month."""
        total, begins = Decimal(0), self.included
        for tier in self.tiers:
            ends = operations if tier.up_to is None else min(operations, tier.up_to)
            if ends > begins:
                total += tier.per_million * (ends - begins) / _MILLION
                begins = ends
        return total

    def bandwidth_price(self, size: int) -> Decimal:
        """Return the price of carrying this number of bytes."""
        return self.bandwidth_per_gigabyte * size / _GIGABYTE

    def text_of(self, amount: Decimal) -> str:
        """Return an amount of money as text; an amount close to zero is not rounded to zero."""
        if 0 < amount < _LEAST_SHOWN:
            return f"less than {_LEAST_SHOWN} {self.currency}"
        return f"{amount:,.4f} {self.currency}"

    def base_price(self, hours: Decimal, namespaces: int) -> Decimal:
        """Return the base charge of the namespaces for this number of hours."""
        count = namespaces if self.base_per_namespace else 1
        return self.base_per_hour * hours * self.base_units * count

    def with_completions(self, billed: bool | None) -> "PriceSheet":  # noqa: FBT001 - a switch
        """Return the sheet with completions billed or not; None keeps its own setting."""
        return self if billed is None else replace(self, bill_completions=billed)


@dataclass(frozen=True, slots=True)
class Billed:
    """The billed operations and bytes of a stage."""

    operations: int
    size: int = 0  # bytes


@dataclass(frozen=True, slots=True)
class MonthlyPrice:
    """The price of a stage in a month."""

    month: str  # 2026-11
    stage: str
    operations: int
    price: Decimal
    bytes: int
    bandwidth_price: Decimal

    def rounded(self) -> Self:
        """Return the row with the digits that a table has."""
        return replace(
            self,
            price=self.price.quantize(_SMALLEST),
            bandwidth_price=self.bandwidth_price.quantize(_SMALLEST),
        )


def priced(months: Mapping[str, Mapping[str, Billed]], sheet: PriceSheet) -> Iterator[MonthlyPrice]:
    """Yield each stage's share of the price of its month, without the base charge."""
    order = {stage.value: at for at, stage in enumerate(Stage)}
    for month in sorted(months):
        counts = months[month]
        total = sum(billed.operations for billed in counts.values())
        price = sheet.price_of(total)
        for stage in sorted(counts, key=lambda name: order[name]):
            billed = counts[stage]
            share = price * billed.operations / total if total else Decimal(0)
            yield MonthlyPrice(
                month,
                stage,
                billed.operations,
                share,
                billed.size,
                sheet.bandwidth_price(billed.size),
            )


def built_in_sheets() -> list[str]:
    """Return the names of the sheets that are part of Twinbus."""
    found = files("twinbus.cost").joinpath("prices").iterdir()
    return sorted(f.name.removesuffix(".toml") for f in found if f.name.endswith(".toml"))


def load_sheet(wanted: str) -> PriceSheet:
    """Return a sheet by its name, or read one from a file."""
    known = built_in_sheets()
    if wanted in known:
        text = files("twinbus.cost").joinpath("prices", f"{wanted}.toml").read_text("utf-8")
    elif wanted.endswith(".toml"):
        try:
            text = Path(wanted).read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise InvalidArgumentError(
                f"price sheet {wanted:.99} is not valid UTF-8 at byte {error.start + 1}. Save it "
                "as UTF-8"
            ) from error
        except (OSError, ValueError) as error:
            raise InvalidArgumentError(
                f"price sheet {wanted:.99} cannot be read: {error}. Check its path and permissions"
            ) from error
    else:
        raise InvalidArgumentError(
            f"there is no price sheet {wanted!r:.200}; the names are {', '.join(known)}. To use a "
            "sheet of your own, give the path of a file whose name ends in .toml"
        )
    try:
        return _sheet(tomllib.loads(text, parse_float=Decimal))
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"price sheet {wanted}: {error.text}") from error
    except ArithmeticError as error:
        raise InvalidArgumentError(
            f"price sheet {wanted} contains a value that is too large or not a number. Correct it"
        ) from error
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(
            f"price sheet {wanted} is not valid TOML: {error}. Correct that line"
        ) from error


def _sheet(found: Mapping[str, Any]) -> PriceSheet:
    _check_names("the sheet", found, {*_TEXTS, "as_of", "base", "operations", "bandwidth"})
    for name in _TEXTS:
        if not isinstance(found.get(name), str) or not found[name].strip():
            raise InvalidArgumentError(f"{name} is missing or is not a text; set it to a text")
    if type(found.get("as_of")) is not date:
        raise InvalidArgumentError(
            f"as_of is {shown(found.get('as_of'))}; it must be a date without quotes, such as "
            "2026-11-16"
        )
    base, operations = found.get("base", {}), found.get("operations", {})
    bandwidth = found.get("bandwidth", {})
    _check_names("[bandwidth]", bandwidth, {"per_gigabyte"})
    _check_names("[base]", base, {"per_hour", "counted_per", "units"})
    _check_names(
        "[operations]", operations, {"included", "bill_completions", "bill_management", "tier"}
    )
    counted_per = base.get("counted_per", _COUNTED_PER[0])
    if counted_per not in _COUNTED_PER:
        raise InvalidArgumentError(
            f"base.counted_per is {shown(counted_per)}; it must be one of {', '.join(_COUNTED_PER)}"
        )
    for name in ("bill_completions", "bill_management"):
        if not isinstance(operations.get(name, True), bool):
            raise InvalidArgumentError(
                f"operations.{name} is {shown(operations[name])}; it must be true or false"
            )
    return PriceSheet(
        name=found["name"],
        as_of=found["as_of"],
        source=found["source"],
        currency=found["currency"],
        base_per_hour=_number("base.per_hour", base.get("per_hour", 0)),
        base_per_namespace=counted_per == "namespace",
        base_units=_integer("base.units", base.get("units", 1), low=1),
        included=_integer("operations.included", operations.get("included", 0)),
        tiers=_tiers(operations.get("tier", [])),
        bill_completions=operations.get("bill_completions", False),
        bill_management=operations.get("bill_management", True),
        bandwidth_per_gigabyte=_number("bandwidth.per_gigabyte", bandwidth.get("per_gigabyte", 0)),
    )


def _tiers(tables: Any) -> tuple[Tier, ...]:
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise InvalidArgumentError(
            "operations.tier is not a list of tables; write each tier under [[operations.tier]], "
            "with two brackets"
        )
    tiers = []
    for table in tables:
        _check_names("a tier", table, {"up_to", "per_million"})
        up_to = _integer("up_to", table["up_to"]) if "up_to" in table else None
        tiers.append(Tier(up_to, _number("per_million", table.get("per_million"))))
    bounds = [tier.up_to for tier in tiers]
    below = [bound for bound in bounds[:-1] if bound is not None]
    if tiers and (bounds[-1] is not None or None in bounds[:-1] or below != sorted(set(below))):
        raise InvalidArgumentError(
            f"the values of up_to are {shown(bounds)}; sort the tiers in ascending order, and give "
            "each tier an up_to, except the last"
        )
    return tuple(tiers)


def _check_names(where: str, table: Any, known: set[str]) -> None:
    if not isinstance(table, dict):
        raise InvalidArgumentError(f"{where} is {shown(table)}; it must be a table of settings")
    unknown = sorted(set(table) - known)
    if unknown:
        raise InvalidArgumentError(
            f"{where} has the unknown setting {unknown[0]!r}; the settings are "
            f"{', '.join(sorted(known))}"
        )


def _number(name: str, value: Any) -> Decimal:
    is_number = isinstance(value, int | Decimal) and not isinstance(value, bool)
    if not is_number or not Decimal(value).is_finite() or not 0 <= value <= MAX_PRICE:
        raise InvalidArgumentError(f"{name} is {value!s:.40}; it must be from 0 to {MAX_PRICE}")
    return Decimal(value)


def _integer(name: str, value: Any, low: int = 0) -> int:
    if type(value) is not int or not low <= value <= MAX_OPERATIONS:
        raise InvalidArgumentError(
            f"{name} is {value!s:.40}; it must be a whole number from {low} to {MAX_OPERATIONS}"
        )
    return value
