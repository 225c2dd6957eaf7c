"""`twinbus queue`, `topic`, `subscription` and `rule`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from datetime import timedelta
from typing import Any, Literal

import click

from twinbus.cli.context import (
    Settings,
    Span,
    examples,
    print_fields,
    print_json,
    print_table,
    talks_to_namespace,
)
from twinbus.client.manager import NamespaceManager
from twinbus.entities import (
    CorrelationFilter,
    EntityDescription,
    EntityStatus,
    QueueDescription,
    RuleDescription,
    RuleFilter,
    SqlAction,
    SqlFilter,
    SubscriptionDescription,
    TopicDescription,
    TrueFilter,
)
from twinbus.limits import MAX_MAX_DELIVERY_COUNT, MAX_SIZE_MEGABYTES
from twinbus.spans import format_span

_NAMES = ("path", "topic_path", "name")
_HELP = {
    "max_size_in_megabytes": "Maximum size of all its messages.",
    "max_delivery_count": "Failed deliveries before a message is dead-lettered.",
    "default_message_time_to_live": "Maximum time to live of a message.",
    "auto_delete_on_idle": "Delete the entity after it was unused for this long.",
    "lock_duration": "How long a lock lasts before it must be renewed.",
    "enable_dead_lettering_on_message_expiration": "Dead-letter expired messages.",
    "enable_dead_lettering_on_filter_evaluation_exceptions": (
        "Dead-letter messages for which a rule fails."
    ),
    "enable_batched_operations": "No effect, for compatibility: sends are always batched.",
    "requires_session": "Messages belong to sessions; fixed at creation.",
    "requires_duplicate_detection": "Ignore repeated message ids; fixed at creation.",
    "duplicate_detection_history_time_window": "How long message ids are remembered.",
    "enable_partitioning": "Several message stores; fixed at creation.",
    "enable_express": "No effect, for compatibility: every message is durable.",
    "support_ordering": "No effect, for compatibility: messages stay in order.",
    "forward_to": "Queue or topic to which every message is forwarded.",
    "forward_dead_lettered_messages_to": "Queue or topic to which dead letters are forwarded.",
    "status": "Which operations the entity accepts.",
    "user_metadata": "Any text.",
}


_MOST = {
    "max_size_in_megabytes": MAX_SIZE_MEGABYTES,
    "max_delivery_count": MAX_MAX_DELIVERY_COUNT,
}
_FIXED = ("requires_session", "requires_duplicate_detection", "enable_partitioning")


def _change_options(kind: type[EntityDescription]) -> Callable[[Any], Any]:
    """Give a command one option for each setting that can be changed; none has a default."""

    def decorate(command: Any) -> Any:
        for f in reversed(fields(kind)):
            if f.name in (*_NAMES, *_FIXED):
                continue
            flag = "--" + f.name.replace("_", "-")
            if f.type is bool:
                flag = f"{flag}/--no-{flag[2:]}"
            most = click.IntRange(1, _MOST.get(f.name))
            types: dict[Any, Any] = {timedelta: Span(), int: most, bool: bool}
            types[EntityStatus] = click.Choice([status.value for status in EntityStatus])
            command = click.option(
                flag, f.name, type=types.get(f.type), default=None, help=_HELP[f.name]
            )(command)
        return command

    return decorate


def _changed(description: Any, options: Mapping[str, Any]) -> Any:
    """Return a description with the settings that were given; an empty text removes a setting."""
    given = {name: value for name, value in options.items() if value is not None}
    if not given:
        raise click.UsageError(
            "nothing is to be changed; give an option for each setting to change"
        )
    if "status" in given:
        given["status"] = EntityStatus(given["status"])
    return replace(description, **{n: None if value == "" else value for n, value in given.items()})


def _settings_options(kind: type[EntityDescription]) -> Callable[[Any], Any]:
    """Add an option to a command for each setting of a kind of entity."""

    def decorate(command: Any) -> Any:
        for f in reversed(fields(kind)):
            if f.name in _NAMES:
                continue
            flag = "--" + f.name.replace("_", "-")
            default: Any = f.default
            text = _HELP[f.name]
            if f.type is bool:
                flags = f"{flag}/--no-{flag[2:]}"
                command = click.option(flags, f.name, default=default, help=text)(command)
            elif f.type is timedelta:
                shown = format_span(default)
                command = click.option(
                    flag, type=Span(), default=shown, show_default=True, help=text
                )(command)
            elif f.type is EntityStatus:
                choice = click.Choice([status.value for status in EntityStatus])
                command = click.option(flag, type=choice, default=default.value, help=text)(command)
            elif f.type is int:
                command = click.option(
                    flag, type=int, default=default, show_default=True, help=text
                )(command)
            else:
                command = click.option(flag, help=text)(command)
        return command

    return decorate


_exist_ok = click.option(
    "--exist-ok", is_flag=True, help="If it already exists, show it unchanged; not an error."
)


def _described(kind: Any, settings: Mapping[str, Any], **names: str) -> Any:
    return kind(**{**settings, "status": EntityStatus(settings["status"])}, **names)


def _show(settings: Settings, manager: NamespaceManager, description: EntityDescription) -> None:
    runtime = manager.get_runtime_properties(description.path)
    if settings.as_json:
        print_json({"description": description, "runtime": runtime})
    else:
        print_fields(description, settings)
        click.echo()
        print_fields(runtime, settings)


def _list(
    settings: Settings, manager: NamespaceManager, found: Sequence[EntityDescription]
) -> None:
    runtimes = [manager.get_runtime_properties(entity.path) for entity in found]
    if settings.as_json:
        print_json(
            [
                {"description": entity, "runtime": runtime}
                for entity, runtime in zip(found, runtimes, strict=True)
            ]
        )
        return
    rows = (
        (
            entity.path,
            entity.status,
            runtime.active_message_count,
            runtime.dead_letter_message_count,
            runtime.scheduled_message_count,
            runtime.size_in_bytes,
        )
        for entity, runtime in zip(found, runtimes, strict=True)
    )
    columns = ["path", "status", "active", "dead-letter", "scheduled", "bytes"]
    print_table(columns, rows, "there are none")


# -- queues and topics ---------------------------------------------------------------------------


def _entity_group(kind: Literal["queue", "topic"], description: type[EntityDescription]) -> Any:
    """Return the commands for queues or for topics; only the settings of these differ."""

    @click.group(kind, help=f"Create, list, show, update and delete {kind}s.")
    def group() -> None:
        pass

    @group.command(
        "create",
        help=f"Create the {kind} PATH.",
        epilog=examples(f"twinbus {kind} create orders --default-message-time-to-live 7d"),
    )
    @click.argument("path")
    @_exist_ok
    @_settings_options(description)
    @talks_to_namespace
    def create(settings: Settings, path: str, exist_ok: bool, **options: Any) -> None:
        with settings.manager() as manager:
            wanted = _described(description, options, path=path)
            made = getattr(manager, f"create_{kind}")(wanted, exist_ok=exist_ok)
            print_fields(made, settings)

    @group.command(
        "list",
        help=f"List {kind}s and their message counts.",
        epilog=examples(f"twinbus {kind} list --json"),
    )
    @talks_to_namespace
    def list_all(settings: Settings) -> None:
        with settings.manager() as manager:
            _list(settings, manager, getattr(manager, f"list_{kind}s")())

    @group.command(
        "show",
        help=f"Show the settings and message counts of a {kind}.",
        epilog=examples(f"twinbus {kind} show orders"),
    )
    @click.argument("path")
    @talks_to_namespace
    def show(settings: Settings, path: str) -> None:
        with settings.manager() as manager:
            _show(settings, manager, getattr(manager, f"get_{kind}")(path))

    @group.command(
        "update",
        help=f"Change the settings of the {kind} PATH that are given, and no others.",
        epilog=examples(f"twinbus {kind} update orders --status disabled"),
    )
    @click.argument("path")
    @_change_options(description)
    @talks_to_namespace
    def update(settings: Settings, path: str, **options: Any) -> None:
        with settings.manager() as manager:
            wanted = _changed(getattr(manager, f"get_{kind}")(path), options)
            print_fields(getattr(manager, f"update_{kind}")(wanted), settings)

    @group.command(
        "delete",
        help=f"Delete a {kind} and its messages.",
        epilog=examples(f"twinbus {kind} delete orders --yes"),
    )
    @click.argument("path")
    @click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
    @talks_to_namespace
    def delete(settings: Settings, path: str, yes: bool) -> None:
        _confirm(path, yes)
        with settings.manager() as manager:
            getattr(manager, f"delete_{kind}")(path)

    return group


def _confirm(path: str, yes: bool) -> None:
    if not yes:
        click.confirm(f"Delete {path} and all messages in it?", abort=True, err=True)


queue = _entity_group("queue", QueueDescription)
topic = _entity_group("topic", TopicDescription)


# -- subscriptions -----------------------------------------------------------------------------


@click.group()
def subscription() -> None:
    """Create, list, show, update and delete subscriptions of a topic."""


@subscription.command(
    "create",
    epilog=examples("twinbus subscription create news sport --sql \"category = 'sport'\""),
)
@click.argument("topic_path", metavar="TOPIC")
@click.argument("name")
@click.option("--sql", help="SQL condition of the first rule; it replaces the catch-all rule.")
@_exist_ok
@_settings_options(SubscriptionDescription)
@talks_to_namespace
def create_subscription(
    settings: Settings,
    topic_path: str,
    name: str,
    sql: str | None,
    exist_ok: bool,
    **options: Any,
) -> None:
    """Subscribe NAME to TOPIC."""
    wanted = _described(SubscriptionDescription, options, topic_path=topic_path, name=name)
    first = RuleDescription("selected", SqlFilter(sql)) if sql else None
    with settings.manager() as manager:
        made = manager.create_subscription(topic_path, wanted, first, exist_ok=exist_ok)
    print_fields(made, settings)


@subscription.command("list", epilog=examples("twinbus subscription list news"))
@click.argument("topic_path", metavar="TOPIC")
@talks_to_namespace
def list_subscriptions(settings: Settings, topic_path: str) -> None:
    """List the subscriptions of TOPIC and their message counts."""
    with settings.manager() as manager:
        found = manager.list_subscriptions(topic_path)
        _list(settings, manager, found)


@subscription.command("show", epilog=examples("twinbus subscription show news sport"))
@click.argument("topic_path", metavar="TOPIC")
@click.argument("name")
@talks_to_namespace
def show_subscription(settings: Settings, topic_path: str, name: str) -> None:
    """Show the settings and message counts of a subscription."""
    with settings.manager() as manager:
        _show(settings, manager, manager.get_subscription(topic_path, name))


@subscription.command(
    "update", epilog=examples("twinbus subscription update news sport --lock-duration 30s")
)
@click.argument("topic_path", metavar="TOPIC")
@click.argument("name")
@_change_options(SubscriptionDescription)
@talks_to_namespace
def update_subscription(settings: Settings, topic_path: str, name: str, **options: Any) -> None:
    """Change the settings of a subscription that are given, and no others."""
    with settings.manager() as manager:
        wanted = _changed(manager.get_subscription(topic_path, name), options)
        print_fields(manager.update_subscription(wanted), settings)


@subscription.command("delete", epilog=examples("twinbus subscription delete news sport --yes"))
@click.argument("topic_path", metavar="TOPIC")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@talks_to_namespace
def delete_subscription(settings: Settings, topic_path: str, name: str, yes: bool) -> None:
    """Delete a subscription and its messages."""
    _confirm(f"{name} of {topic_path}", yes)
    with settings.manager() as manager:
        manager.delete_subscription(topic_path, name)


# -- rules -------------------------------------------------------------------------------------


@click.group()
def rule() -> None:
    """Create, list, show, update and delete rules of a subscription."""


def _rule_options(command: Any) -> Any:
    """Give a command the options that say what a rule selects and does."""
    for option in (
        click.option("--action", help="SQL action on the selected copy."),
        click.option(
            "--match", multiple=True, metavar="FIELD=TEXT", help="Field that must equal a text."
        ),
        click.option("--sql", help="SQL condition."),
    ):
        command = option(command)
    return command


def _rule(name: str, sql: str | None, match: Sequence[str], action: str | None) -> RuleDescription:
    """Return the rule that options describe."""
    if sql and match:
        raise click.UsageError("--sql and --match cannot be combined; give one of them")
    selects: RuleFilter = TrueFilter()
    if sql:
        selects = SqlFilter(sql)
    elif match:
        selects = _correlation(match)
    return RuleDescription(name, selects, SqlAction(action) if action else None)


@rule.command(
    "create",
    epilog=examples(
        'twinbus rule create news sport urgent --sql "priority > 5" --action "SET seen = 1"',
        "twinbus rule create news sport red --match subject=red",
    ),
)
@click.argument("topic_path", metavar="TOPIC")
@click.argument("subscription_name", metavar="SUBSCRIPTION")
@click.argument("name")
@_rule_options
@talks_to_namespace
def create_rule(
    settings: Settings,
    topic_path: str,
    subscription_name: str,
    name: str,
    sql: str | None,
    match: Sequence[str],
    action: str | None,
) -> None:
    """Add the rule NAME: a SQL condition, fields to match, or neither for all messages."""
    made = _rule(name, sql, match, action)
    with settings.manager() as manager:
        manager.create_rule(topic_path, subscription_name, made)
    print_fields(made, settings)


@rule.command(
    "update", epilog=examples('twinbus rule update news sport urgent --sql "priority > 7"')
)
@click.argument("topic_path", metavar="TOPIC")
@click.argument("subscription_name", metavar="SUBSCRIPTION")
@click.argument("name")
@_rule_options
@talks_to_namespace
def update_rule(
    settings: Settings,
    topic_path: str,
    subscription_name: str,
    name: str,
    sql: str | None,
    match: Sequence[str],
    action: str | None,
) -> None:
    """Replace the condition and the action of the rule NAME."""
    made = _rule(name, sql, match, action)
    with settings.manager() as manager:
        manager.update_rule(topic_path, subscription_name, made)
    print_fields(made, settings)


def _correlation(match: Sequence[str]) -> CorrelationFilter:
    known = {f.name for f in fields(CorrelationFilter)} - {"properties"}
    own: dict[str, str] = {}
    properties: dict[str, str] = {}
    for pair in match:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise click.UsageError(f"--match {pair!r:.80} must be written as FIELD=TEXT")
        (own if name in known else properties)[name] = text
    return CorrelationFilter(**own, properties=properties)


@rule.command("list", epilog=examples("twinbus rule list news sport"))
@click.argument("topic_path", metavar="TOPIC")
@click.argument("subscription_name", metavar="SUBSCRIPTION")
@talks_to_namespace
def list_rules(settings: Settings, topic_path: str, subscription_name: str) -> None:
    """List the rules of a subscription."""
    with settings.manager() as manager:
        found = manager.list_rules(topic_path, subscription_name)
    if settings.as_json:
        print_json(list(found))
    else:
        rows = (
            (known.name, _described_filter(known.filter), known.action and known.action.expression)
            for known in found
        )
        print_table(["rule", "selects", "action"], rows, "there are none")


def _described_filter(selects: RuleFilter) -> str:
    if isinstance(selects, SqlFilter):
        return selects.expression
    if isinstance(selects, CorrelationFilter):
        wanted = {f.name: getattr(selects, f.name) for f in fields(selects)}
        wanted |= selects.properties
        return " and ".join(f"{n} = {v!r}" for n, v in wanted.items() if v and n != "properties")
    return "every message" if isinstance(selects, TrueFilter) else "no message"


@rule.command("show", epilog=examples("twinbus rule show news sport urgent"))
@click.argument("topic_path", metavar="TOPIC")
@click.argument("subscription_name", metavar="SUBSCRIPTION")
@click.argument("name")
@talks_to_namespace
def show_rule(settings: Settings, topic_path: str, subscription_name: str, name: str) -> None:
    """Show a rule."""
    with settings.manager() as manager:
        print_fields(manager.get_rule(topic_path, subscription_name, name), settings)


@rule.command("delete", epilog=examples("twinbus rule delete news sport urgent"))
@click.argument("topic_path", metavar="TOPIC")
@click.argument("subscription_name", metavar="SUBSCRIPTION")
@click.argument("name")
@talks_to_namespace
def delete_rule(settings: Settings, topic_path: str, subscription_name: str, name: str) -> None:
    """Delete a rule."""
    with settings.manager() as manager:
        manager.delete_rule(topic_path, subscription_name, name)
