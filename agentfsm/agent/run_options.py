"""``RunOptions`` and what else varies from run to run: checked, applied to an agent's configuration, and restored.

The journal of a run has all of it but a model that was given as an object. So a run that is resumed has what it was
started with, whatever its agent has by then; or it is refused, and the error says why.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from agentfsm.agent.config import resolve_model, with_host
from agentfsm.errors import ConfigurationError, MissingModelError, RunError
from agentfsm.loop.guardrails import AgentGuardrails
from agentfsm.loop.model import Model
from agentfsm.loop.state import NO_DETAILS, RunDetails, RunState
from agentfsm.loop.withholding import lacks_values
from agentfsm.runtime.context import AgentConfig

if TYPE_CHECKING:
    from agentfsm.models.settings import ModelSettings


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What one run has instead of what its agent has; None for the agent's.

    Attributes:
        model: The model, or its name. A run with a model that is given as an object is resumed only if it is given
            again: no journal holds an object.
        settings: Settings of the model; those that are set replace the model's own.
        guardrails: The limits, all of them: ``agent.guardrails.model_copy(update={"max_iterations": 5})`` changes one.

    Raises:
        RunError: One of them is something else.
    """

    model: str | Model | None = None
    settings: ModelSettings | None = None
    guardrails: AgentGuardrails | None = None

    def __post_init__(self) -> None:
        model: Any = self.model
        guardrails: Any = self.guardrails
        if not (model is None or isinstance(model, str) or (hasattr(model, "reply") and hasattr(model, "name"))):
            raise RunError(f"a model must be a name, or an object with reply() and a name, not {type(model).__name__}")
        if self.settings is not None:
            _check_settings(self.settings)
        if not (guardrails is None or isinstance(guardrails, AgentGuardrails)):
            raise RunError(f"guardrails must be an AgentGuardrails, not {type(guardrails).__name__}")


def _check_settings(settings: object) -> None:
    from agentfsm.models.settings import ModelSettings  # only for runs with settings of their own

    if not isinstance(settings, ModelSettings):
        raise RunError(f"settings must be a ModelSettings, not {type(settings).__name__}")


def run_details(tags: Iterable[str], metadata: Mapping[str, Any], options: RunOptions | None) -> RunDetails:
    """What a run is given besides its prompt, after checking it.

    Raises:
        RunError: It is not what it must be; the error says where.
    """
    if not tags and not metadata and options is None:
        return NO_DETAILS
    details = RunDetails(_valid_tags(tags), _valid_metadata(metadata))
    if options is None:
        return details
    if not isinstance(options, RunOptions):  # pyright: ignore[reportUnnecessaryIsInstance]  # for untyped callers
        raise RunError(
            f"options must be a RunOptions, as in options=RunOptions(model=...), not {type(options).__name__}"
        )
    model, settings = options.model, options.settings
    return replace(
        details,
        model="" if model is None else model if isinstance(model, str) else model.name,
        model_is_object=model is not None and not isinstance(model, str),
        settings={} if settings is None else settings.model_dump(mode="json", exclude_unset=True),
        own_guardrails=options.guardrails is not None,
    )


def _valid_tags(tags: Any) -> tuple[str, ...]:
    """The tags, each once, in their order."""
    if isinstance(tags, (str, bytes)) or not hasattr(tags, "__iter__"):
        raise RunError(f"tags must be a list of strings, as in tags=['billing'], not {tags!r}")
    names: tuple[Any, ...] = tuple(tags)
    for each in names:
        if not isinstance(each, str) or not each.strip():
            raise RunError(f"a tag must be a string that is not blank, not {each!r}")
    return tuple(dict.fromkeys(names))


def _valid_metadata(metadata: Any) -> dict[str, Any]:
    """A copy of the metadata as plain JSON data."""
    if not hasattr(metadata, "items"):
        raise RunError(f"metadata must be a JSON object, as in metadata={{'tenant': 7}}, not {type(metadata).__name__}")
    given: dict[Any, Any] = dict(metadata)
    for name in given:
        if not isinstance(name, str):
            raise RunError(f"the names in metadata must be strings, not {name!r}")
    try:
        copied: dict[str, Any] = json.loads(json.dumps(given, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise RunError(f"metadata is not JSON: {error}") from None
    return copied


def with_options(config: AgentConfig, options: RunOptions | None) -> AgentConfig:
    """The configuration of one run.

    Raises:
        ConfigurationError: The model is unknown or has no key, or does not take the settings.
    """
    if options is None:
        return config
    model = config.model if options.model is None else resolve_model(options.model)
    if options.settings is not None:
        from agentfsm.models.settings import with_settings  # only for runs with settings of their own

        model = with_settings(model, options.settings)
    return with_host(replace(config, model=model), config.host, options.guardrails)


def restore_options(config: AgentConfig, state: RunState, model: Model | None) -> AgentConfig:
    """The configuration with which a run continues: its agent's, with what the run was given when it was started.

    Raises:
        MissingModelError: The run's model is no longer available; the error says why.
    """
    details = state.details
    if model is not None and (not details.model or model.name != details.model):
        asked = repr(details.model) if details.model else f"that of its agent, {config.model.name!r}"
        raise MissingModelError(f"run {state.run_id!r} has the model {asked}, and model={model.name!r} is another")
    if not details.model and not details.settings and not details.own_guardrails:
        return config
    if details.model_is_object and model is None:
        raise MissingModelError(
            f"run {state.run_id!r} was started with the model {details.model!r}, given as an object, which no journal "
            "holds: give it again with agent.resume(..., model=...); nothing was changed"
        )
    if lacks_values(details.settings):
        raise MissingModelError(
            f"the settings of the model of run {state.run_id!r} held a secret, which is not stored (the extra "
            "'sealing' stores secrets encrypted); nothing was changed"
        )
    try:
        options = RunOptions(
            model or details.model or None,
            _stored_settings(details.settings) if details.settings else None,
            state.guardrails if details.own_guardrails else None,
        )
        return with_options(config, options)
    except ConfigurationError as error:
        raise MissingModelError(
            f"run {state.run_id!r} was started with a model that is not available here: {error}; nothing was changed"
        ) from error


def _stored_settings(settings: Mapping[str, Any]) -> ModelSettings:
    from agentfsm.models.settings import ModelSettings

    return ModelSettings.model_validate_json(json.dumps(settings))
