"""Price sheets: what operations cost to the last digit, and which sheets are refused."""

from collections.abc import Callable
from datetime import date
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.properties import replayed, replayed_at_length
from twinbus.cost.prices import PriceSheet, Tier, built_in_sheets, load_sheet
from twinbus.cost.stages import COMPLETIONS, DIVERTED
from twinbus.errors import InvalidArgumentError

Sheets = Callable[[str, str | None], str]
MILLION = 1_000_000
GOOD = {
    "name": '"mine"',
    "as_of": "2026-01-31",
    "source": '"my contract"',
    "currency": '"EUR"',
    "base.per_hour": "0.1",
    "base.counted_per": '"namespace"',
    "base.units": "2",
    "operations.included": "10",
    "operations.bill_completions": "true",
    "operations.bill_management": "false",
}
TIER = {"up_to": "100", "per_million": "0.3"}  # the first of two
TEXTS, NUMBERS = ("name", "source", "currency"), ("base.per_hour", "per_million")
COUNTS, SWITCHES = ("base.units", "operations.included", "up_to"), ("completions", "management")
NOT_A_NUMBER = ("-1", "-0.001", "true", '"0.5"', "[1]", "{a = 1}", "2026-01-01", "inf", "-inf")
MISTAKES = [
    *((name, bad) for name in TEXTS for bad in ("1", "true", "2026-01-01", "['a']", "{}", None)),
    *(("as_of", bad) for bad in ('"2026-01-31"', "2026", "12:00:00", "true", None)),
    *((name, bad) for name in NUMBERS for bad in NOT_A_NUMBER),
    *((name, bad) for name in COUNTS for bad in (*NOT_A_NUMBER, "1.0", "1.5")),
    *(("base.counted_per", bad) for bad in ('"queue"', '""', "1", "true", "['account']", "{}")),
    *((f"operations.bill_{name}", bad) for name in SWITCHES for bad in ("1", '"yes"', "[]", "{}")),
    *((name, "1") for name in ("nam", "base.per_our", "operations.tiers", "prices")),
    *((name, bad) for name in ("base", "operations") for bad in ("1", '"a"', "[]", "[{}]")),
    ("per_million", None),
    ("operations.tier", "{per_million = 1}"),
    *(
        ("operations.tier", f"[{', '.join(f'{{{tier}per_million = 1}}' for tier in tiers)}]")
        for tiers in (["up_to = 9, "], ["", "up_to = 9, "], ["", ""], ["up_to = 9, "] * 2 + [""])
    ),
]


@pytest.mark.parametrize(
    ("operations", "price"),
    [
        (0, "0"),
        (13 * MILLION, "0"),
        (13 * MILLION + 1, "0.0000008"),
        (14 * MILLION, "0.80"),
        (100 * MILLION, "69.60"),
        (100 * MILLION + 1, "69.6000005"),
        (2500 * MILLION, "1269.60"),
        (2500 * MILLION + 1, "1269.6000002"),
        (3500 * MILLION, "1469.60"),
    ],
)
def test_the_standard_tiers_are_exact(operations: int, price: str) -> None:
    assert load_sheet("azure-standard").price_of(operations) == Decimal(price)


@replayed
@given(
    st.sets(st.integers(1, 50), max_size=4),
    st.lists(st.decimals(0, 5, places=2), min_size=5, max_size=5),
    st.integers(0, 40),
)
def test_money_grows_with_operations_one_by_one(
    bounds: set[int], prices: list[Decimal], included: int
) -> None:
    ends = [*sorted(bounds), None]
    tiers = [Tier(end, price) for end, price in zip(ends, prices, strict=False)]
    sheet = PriceSheet(
        name="n", as_of=date.min, source="s", currency="c", included=included, tiers=tiers
    )
    total = Decimal(0)
    for number in range(1, 80):
        if number > included:
            tier = next(t for t in tiers if t.up_to is None or number <= t.up_to)
            total += tier.per_million / MILLION
        assert sheet.price_of(number) == total >= sheet.price_of(number - 1)


def test_standard_has_one_base_charge_and_premium_one_per_unit_of_each_namespace() -> None:
    assert load_sheet("azure-standard").base_price(Decimal(10), 2) == Decimal("0.135")
    premium = load_sheet("azure-premium")
    assert premium.base_price(Decimal(10), 1) == Decimal("9.28")
    assert premium.base_price(Decimal(10), 2) == Decimal("18.56")
    assert premium.price_of(10**12) == 0


def test_own_servers_cost_nothing() -> None:
    zero = load_sheet("zero")
    assert zero.price_of(10**12) == zero.base_price(Decimal(720), 2) == 0


@pytest.mark.parametrize("name", ["azure-standard", "azure-premium", "zero"])
def test_a_sheet_is_dated_names_its_source_and_has_a_switch_for_completions(name: str) -> None:
    sheet = load_sheet(name)
    assert name in built_in_sheets()
    assert (type(sheet.as_of), bool(sheet.source), sheet.currency) == (date, True, "USD")
    assert sheet.with_completions(None) == sheet
    for billed in (True, False):
        switched = sheet.with_completions(billed)
        assert {switched.bills(stage) for stage in COMPLETIONS} == {billed}
        assert all(switched.bills(stage) for stage in DIVERTED)


@pytest.fixture(scope="module", name="write")
def _write(tmp_path_factory: pytest.TempPathFactory) -> Sheets:
    path = tmp_path_factory.mktemp("sheets") / "mine.toml"

    def write(changed: str, value: str | None) -> str:
        if changed in TIER:
            tier = {**TIER, changed: value}
            first = ", ".join(f"{name} = {given}" for name, given in tier.items() if given)
            changed, value = "operations.tier", f"[{{{first}}}, {{per_million = 0.1}}]"
        kept = {name: old for name, old in GOOD.items() if not name.startswith(f"{changed}.")}
        lines = {**kept, changed: value}
        path.write_text("\n".join(f"{name} = {given}" for name, given in lines.items() if given))
        return str(path)

    return write


def test_a_sheet_of_ones_own_is_read_as_it_is_written(write: Sheets) -> None:
    sheet = load_sheet(write("per_million", "0.3"))
    assert sheet.base_price(Decimal(10), 3) == Decimal(6)  # of 2 units each
    assert sheet == PriceSheet(
        name="mine",
        as_of=date(2026, 1, 31),
        source="my contract",
        currency="EUR",
        base_per_hour=Decimal("0.1"),
        base_per_namespace=True,
        base_units=2,
        included=10,
        tiers=(Tier(100, Decimal("0.3")), Tier(None, Decimal("0.1"))),
        bill_completions=True,
        bill_management=False,
    )


@replayed_at_length
@given(mistake=st.sampled_from(MISTAKES))
def test_a_mistake_is_refused_by_its_name(write: Sheets, mistake: tuple[str, str | None]) -> None:
    path = write(*mistake)
    with pytest.raises(InvalidArgumentError) as refused:
        load_sheet(path)
    assert path in refused.value.text
    assert mistake[0].rpartition(".")[2] in refused.value.text.replace(path, "")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("base.per_hour", "nan"),  # decimal.InvalidOperation
        ("per_million", "1e99999999999999999999"),  # decimal.InvalidOperation
        ("base.units", "9" * 5000),  # ValueError
        ("as_of", "2026-01-31T12:00:00"),  # taken, though it is no date
        ("operations.tier", "[{up_to = 0, per_million = 1}]"),  # taken: everything is free
    ],
)
def test_a_stranger_mistake_is_refused(write: Sheets, name: str, value: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"mine\.toml") as refused:
        load_sheet(write(name, value))
    assert "<class" not in refused.value.text


@pytest.mark.parametrize("content", [b"name = ", b"\xff\xfe", b"", b"just words", None])
def test_a_file_that_is_no_sheet_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "a.toml").write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=r"a\.toml"):
        load_sheet(str(tmp_path / "a.toml"))


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(InvalidArgumentError, match="azure-premium, azure-standard, zero"):
        load_sheet("azure")
