"""Rules over columns decide as they would row by row, with three-valued logic."""

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.properties import replayed, replayed_at_length
from twinbus.broker.entities.filters import compile_action, compile_filter
from twinbus.broker.entities.row_filters import compile_row_filter
from twinbus.entities import (
    CorrelationFilter,
    FalseFilter,
    RuleFilter,
    SqlAction,
    SqlFilter,
    TrueFilter,
)
from twinbus.errors import InvalidArgumentError
from twinbus.message import BrokeredMessage, sizes, to_batch, to_messages

NAMES = ("a", "b", "c")
LARGEST, SMALLEST = 2**63 - 1, -(2**63)
NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
Bag = Mapping[str, Any]
COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "<>": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
CALCULATE: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}


def carrying(**properties: Any) -> BrokeredMessage:
    return BrokeredMessage(application_properties=properties)


def selected(rule: RuleFilter | str, *messages: BrokeredMessage) -> list[bool]:
    """Return which of the messages a filter selects, looked at together."""
    made = SqlFilter(rule) if isinstance(rule, str) else rule
    found: list[bool] = compile_filter(made)(to_batch(messages)).tolist()
    selects = compile_row_filter(made)
    assert selects is None or [selects(message) for message in messages] == found
    return found


def acted(action: str, *messages: BrokeredMessage, **parameters: Any) -> list[BrokeredMessage]:
    return to_messages(compile_action(SqlAction(action, parameters))(to_batch(messages)))


# -- a ten-line SQL ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Term:
    """SQL, and what it means for one message: a value or None (missing, unknown)."""

    sql: str
    meaning: Callable[[Bag], Any]


def is_number(value: Any) -> bool:
    return type(value) in (int, float)


def compared(symbol: str, first: Any, second: Any) -> bool | None:
    if first is None or second is None:
        return None
    if type(first) is not type(second) and not (is_number(first) and is_number(second)):
        return None
    return COMPARE[symbol](first, second)


def calculated(symbol: str, first: Any, second: Any) -> Any:
    if symbol == "+" and type(first) is type(second) is str:
        return first + second
    if not (is_number(first) and is_number(second)):
        return None
    are_integers = type(first) is type(second) is int
    if symbol in CALCULATE:
        result = CALCULATE[symbol](first, second)
    elif second == 0:
        return None
    elif symbol == "/":
        result = (
            int(math.copysign(abs(first) // abs(second), first * second))
            if are_integers
            else first / second
        )
    else:
        result = int(math.fmod(first, second)) if are_integers else math.fmod(first, second)
    return None if are_integers and not SMALLEST <= result <= LARGEST else result


def conjunction(first: bool | None, second: bool | None) -> bool | None:
    if first is False or second is False:
        return False
    return None if first is None or second is None else True


def negation(first: bool | None) -> bool | None:
    return None if first is None else not first


def binary(symbol: str, first: Term, second: Term, means: Callable[[str, Any, Any], Any]) -> Term:
    return Term(
        f"({first.sql} {symbol} {second.sql})",
        lambda bag: means(symbol, first.meaning(bag), second.meaning(bag)),
    )


def joined(symbol: str, first: Any, second: Any) -> bool | None:
    if symbol == "AND":
        return conjunction(first, second)
    return negation(conjunction(negation(first), negation(second)))


def constant(value: Any) -> Term:
    if isinstance(value, str):
        quoted = value.replace("'", "''")
        return Term(f"'{quoted}'", lambda _: value)
    sql = str(value).upper() if isinstance(value, bool) else f"({value})"
    return Term(sql, lambda _: value)


numbers = st.integers(-9, 9) | st.sampled_from([-2.5, -1.0, 0.0, 0.5, 1.0, 3.0])
words = st.text("ab%_'é", max_size=3)
names = st.sampled_from(NAMES)
bags = st.dictionaries(
    names, st.one_of(numbers, words, st.booleans(), st.binary(max_size=2)), max_size=3
)
properties = names.map(lambda name: Term(name, lambda bag: bag.get(name)))
leaves = st.one_of(
    properties, properties, numbers.map(constant), words.map(constant), st.booleans().map(constant)
)
values = st.recursive(
    leaves,
    lambda inner: st.builds(
        binary, st.sampled_from(["+", "-", "*"]), inner, inner, st.just(calculated)
    ),
    max_leaves=3,
)


def membership(value: Term, members: list[Term]) -> Term:
    def meaning(bag: Bag) -> bool | None:
        found: bool | None = False
        for member in members:
            found = joined("OR", found, compared("=", value.meaning(bag), member.meaning(bag)))
        return found

    return Term(f"({value.sql} IN ({', '.join(m.sql for m in members)}))", meaning)


def likeness(value: Term, pattern: str) -> Term:
    regex = "".join({"%": ".*", "_": "."}.get(c, re.escape(c)) for c in pattern)

    def meaning(bag: Bag) -> bool | None:
        text = value.meaning(bag)
        return bool(re.fullmatch(regex, text, re.DOTALL)) if isinstance(text, str) else None

    return Term(f"({value.sql} LIKE {constant(pattern).sql})", meaning)


conditions = st.recursive(
    st.one_of(
        st.builds(binary, st.sampled_from(list(COMPARE)), values, values, st.just(compared)),
        properties.map(lambda p: Term(f"({p.sql} IS NULL)", lambda bag: p.meaning(bag) is None)),
        properties.map(
            lambda p: Term(f"({p.sql} IS NOT NULL)", lambda bag: p.meaning(bag) is not None)
        ),
        properties.map(lambda p: Term(f"EXISTS({p.sql})", lambda bag: p.meaning(bag) is not None)),
        st.builds(membership, properties, st.lists(leaves, min_size=1, max_size=3)),
        st.builds(likeness, properties, words),
    ),
    lambda inner: st.one_of(
        st.builds(binary, st.sampled_from(["AND", "OR"]), inner, inner, st.just(joined)),
        inner.map(
            lambda value: Term(f"(NOT {value.sql})", lambda bag: negation(value.meaning(bag)))
        ),
    ),
    max_leaves=4,
)


@replayed_at_length
@given(conditions, st.lists(bags, min_size=1, max_size=5))
def test_a_filter_decides_for_a_batch_as_for_each_message(
    condition: Term, stored: list[dict[str, Any]]
) -> None:
    messages = [carrying(**bag) for bag in stored]
    together = selected(condition.sql, *messages)
    assert together == [selected(condition.sql, message)[0] for message in messages]
    assert together == [condition.meaning(bag) is True for bag in stored]


@replayed
@given(conditions, st.lists(bags, min_size=2, max_size=5))
def test_a_filter_decides_the_same_on_a_slice(
    condition: Term, stored: list[dict[str, Any]]
) -> None:
    batch = to_batch([carrying(**bag) for bag in stored])
    select = compile_filter(SqlFilter(condition.sql))
    assert select(batch.slice(1)).tolist() == select(batch).tolist()[1:]


@replayed_at_length
@given(values, st.lists(bags, min_size=1, max_size=5))
def test_an_action_sets_the_value_each_message_gives(
    value: Term, stored: list[dict[str, Any]]
) -> None:
    found = acted(f"SET new = {value.sql}", *[carrying(**bag) for bag in stored])
    for message, bag in zip(found, stored, strict=True):
        expected = value.meaning(bag)
        assert message.application_properties == bag | (
            {} if expected is None else {"new": expected}
        )
        assert type(message.application_properties.get("new")) is type(expected)


# -- three-valued logic ------------------------------------------------------------------------

TRUTH = {"TRUE": "1 = 1", "FALSE": "1 = 2", "UNKNOWN": "missing = 1"}


@pytest.mark.parametrize(
    ("first", "symbol", "second", "outcome"),
    [
        ("TRUE", "AND", "UNKNOWN", "UNKNOWN"),
        ("FALSE", "AND", "UNKNOWN", "FALSE"),
        ("UNKNOWN", "AND", "UNKNOWN", "UNKNOWN"),
        ("TRUE", "OR", "UNKNOWN", "TRUE"),
        ("FALSE", "OR", "UNKNOWN", "UNKNOWN"),
        ("UNKNOWN", "OR", "UNKNOWN", "UNKNOWN"),
        ("TRUE", "AND", "FALSE", "FALSE"),
        ("TRUE", "OR", "FALSE", "TRUE"),
    ],
)
def test_logic_with_the_unknown_is_that_of_sql(
    first: str, symbol: str, second: str, outcome: str
) -> None:
    for left, right in ((first, second), (second, first)):
        condition = f"({TRUTH[left]} {symbol} {TRUTH[right]})"
        assert selected(condition, carrying()) == [outcome == "TRUE"]
        assert selected(f"NOT {condition}", carrying()) == [outcome == "FALSE"]


def test_values_of_different_types_are_neither_equal_nor_different() -> None:
    odd = [carrying(a=value) for value in ("1", True, b"1", UUID(int=1), NOON, timedelta(1))]
    assert selected("a = 1", *odd) == [False] * 6
    assert selected("a <> 1", *odd) == [False] * 6


def test_whole_numbers_and_fractions_compare_as_numbers() -> None:
    assert selected("a = 1", carrying(a=1), carrying(a=1.0), carrying(a=1.5)) == [True, True, False]
    assert selected("a >= 0.5", carrying(a=1), carrying(a=0), carrying(a=0.5)) == [
        True,
        False,
        True,
    ]


# -- no value may bring the broker down --------------------------------------------------------


@pytest.mark.parametrize(
    "sql",
    [
        "a > 1.5",
        "a = 0.5",
        "a IN (1.5, 2.5)",
        "a + 1 > 0",
        "a * 2 > 0",
        "a * 1.5 > 0",
        "a - a = 0",
        "a / 2 > 0",
        "a / 1.5 > 0",
        "a % 10 > 0",
        "-a > 0",
        "a = b",
        "a < b",
    ],
)
def test_a_large_number_is_compared_or_unknown_but_never_an_error(sql: str) -> None:
    large = [carrying(a=number, b=0.5) for number in (LARGEST, SMALLEST, 2**53 + 1)]
    assert len(selected(sql, *large, carrying(a=1, b=2))) == 4


@pytest.mark.parametrize("number", [LARGEST, 2**53 + 1])
def test_large_numbers_compare_rightly_with_fractions(number: int) -> None:
    assert selected("a > 1.5", carrying(a=number), carrying(a=-number)) == [True, False]


def test_arithmetic_that_leaves_64_bits_is_unknown() -> None:
    assert selected("a + 1 > 0 OR a + 1 <= 0", carrying(a=LARGEST)) == [False]
    assert selected("a * 2 > 0 OR a * 2 <= 0", carrying(a=SMALLEST)) == [False]
    assert selected("a + 1 > 0", carrying(a=LARGEST - 1)) == [True]


def test_division_by_zero_is_unknown() -> None:
    for sql in ("1 / a > 0", "1 % a = 0", "1.5 / a > 0", "a / a = 1"):
        assert selected(sql, carrying(a=0), carrying(a=0.0)) == [False, False]


SPECIMENS: list[Any] = [
    "text",
    7,
    7.5,
    True,
    b"bytes",
    NOON,
    timedelta(seconds=7),
    UUID(int=7),
]


@pytest.mark.parametrize("value", SPECIMENS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("symbol", COMPARE)
def test_a_parameter_of_any_type_compares_with_properties_of_its_type(
    value: Any, symbol: str
) -> None:
    rule = SqlFilter(f"a {symbol} @value", {"@value": value})
    messages = [carrying(a=specimen) for specimen in SPECIMENS]
    assert selected(rule, *messages) == [
        compared(symbol, specimen, value) is True for specimen in SPECIMENS
    ]


@pytest.mark.parametrize("value", SPECIMENS, ids=lambda value: type(value).__name__)
def test_properties_of_any_type_compare_with_each_other(value: Any) -> None:
    messages = [carrying(a=value, b=specimen) for specimen in SPECIMENS]
    assert selected("a = b", *messages) == [
        compared("=", value, specimen) is True for specimen in SPECIMENS
    ]


@pytest.mark.parametrize("value", SPECIMENS, ids=lambda value: type(value).__name__)
def test_a_correlation_filter_finds_a_property_of_any_type(value: Any) -> None:
    rule = CorrelationFilter(properties={"a": value})
    messages = [*(carrying(a=specimen) for specimen in SPECIMENS), carrying()]
    assert selected(rule, *messages) == [
        *(compared("=", specimen, value) is True for specimen in SPECIMENS),
        False,
    ]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_odd_fractions_are_no_error(value: float) -> None:
    for sql in ("a > 1", "a + 1 > 0", "a % 2 = 0", "a / 2 > 0", "-a < 0", "a IN (1, 2)"):
        assert len(selected(sql, carrying(a=value), carrying(a=1))) == 2


# -- fields and filters ------------------------------------------------------------------------


def test_fields_of_the_message_are_read_as_sys() -> None:
    sent = BrokeredMessage(subject="s", time_to_live=timedelta(seconds=5))
    assert selected("sys.Label = 's' AND sys.subject = 's'", sent) == [True]
    assert selected(SqlFilter("sys.TimeToLive > @t", {"t": timedelta(seconds=4)}), sent) == [True]


def test_the_plain_filters_select_all_or_nothing() -> None:
    assert selected(TrueFilter(), carrying(), carrying()) == [True, True]
    assert selected(FalseFilter(), carrying(), carrying()) == [False, False]


def test_a_correlation_filter_needs_every_field_it_names() -> None:
    rule = CorrelationFilter(subject="s", to="t")
    sent = [BrokeredMessage(subject=s, to=t) for s, t in [("s", "t"), ("s", None), ("x", "t")]]
    assert selected(rule, *sent) == [True, False, False]


@pytest.mark.parametrize(
    "sql",
    [
        "a =",
        "a = = 1",
        "SELECT 1",
        "a = (SELECT 1)",
        "f(a) = 1",
        "a BETWEEN 1 AND 2",
        "sys.nothing = 1",
        "a = @missing",
        "x.y = 1",
        "a LIKE b",
        "1; DROP TABLE x",
        "'",
    ],
)
def test_sql_that_cannot_be_used_in_a_filter_is_refused_when_the_filter_is_made(sql: str) -> None:
    with pytest.raises(InvalidArgumentError):
        compile_filter(SqlFilter(sql))


def test_like_takes_every_character_but_its_own_literally() -> None:
    texts = ["a.c", "abc", "a%c", "a\nc", "A.C"]
    messages = [carrying(t=text) for text in texts]
    assert selected("t LIKE 'a.c'", *messages) == [True, False, False, False, False]
    assert selected("t LIKE 'a_c'", *messages) == [True, True, True, True, False]
    assert selected("t LIKE 'a!%c' ESCAPE '!'", *messages) == [False, False, True, False, False]


# -- actions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", SPECIMENS, ids=lambda value: type(value).__name__)
def test_an_action_keeps_the_type_of_what_it_sets_and_of_all_else(value: Any) -> None:
    bag = {f"p{number}": specimen for number, specimen in enumerate(SPECIMENS)}
    [copied] = acted("SET copy = old; REMOVE old", carrying(old=value, **bag))
    [given_] = acted("SET copy = @value", carrying(**bag), value=value)
    for found in (copied, given_):
        expected = bag | {"copy": value}
        assert found.application_properties == expected
        assert {n: type(v) for n, v in found.application_properties.items()} == {
            n: type(v) for n, v in expected.items()
        }


def test_an_action_changes_fields_of_the_message() -> None:
    sent = BrokeredMessage(subject="old", to="somewhere")
    [found] = acted("SET sys.Label = 'new'; REMOVE sys.To", sent)
    assert (found.subject, found.to) == ("new", None)


def test_statements_of_an_action_see_each_other() -> None:
    [found] = acted("SET a = 1; SET b = a + 1; SET a = 'x;y'; REMOVE c", carrying(c=1))
    assert found.application_properties == {"a": "x;y", "b": 2}


def test_an_action_counts_in_the_size_of_the_copy() -> None:
    batch = to_batch([carrying(a="1"), carrying()])
    changed = compile_action(SqlAction("SET a = 'four'"))(batch)
    assert (sizes(changed) - sizes(batch)).tolist() == [3, 5]
    assert np.array_equal(sizes(changed.slice(1)), sizes(changed)[1:])


@pytest.mark.parametrize(
    "sql", ["a = 1", "SET", "SET a", "REMOVE", "REMOVE 1", "DROP a", ";", "SET sys.TimeToLive = 1"]
)
def test_sql_that_is_not_an_action_is_refused_when_the_action_is_made(sql: str) -> None:
    with pytest.raises(InvalidArgumentError):
        compile_action(SqlAction(sql))
