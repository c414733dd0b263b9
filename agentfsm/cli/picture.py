"""Pictures in files: which form a file's ending means, and a run's path drawn."""

from __future__ import annotations

from pathlib import Path

from agentfsm.cli.outcome import Story
from agentfsm.diagrams import FORMATS, IMAGES, RunPath, write
from agentfsm.errors import ConfigurationError

__all__ = ["check_drawable", "draw_run", "endings", "form_of"]


def endings(form: str) -> tuple[str, ...]:
    """The endings of files of a form, the usual one first."""
    return FORMATS[form].endings if form in FORMATS else (f".{form}",)


def form_of(path: Path) -> str:
    """The form that a file's ending means.

    Raises:
        ConfigurationError: It means none; the error lists those that do.
    """
    forms = {ending: form for form in (*FORMATS, *IMAGES) for ending in endings(form)}
    form = forms.get(path.suffix.lower())
    if form is None:
        raise ConfigurationError(
            f"the ending of {str(path)!r} names no form of a picture; these do: {', '.join(forms)}"
        )
    return form


def check_drawable(path: Path) -> None:
    """Make sure, before a run costs anything, that its path can be drawn to a file.

    Raises:
        ConfigurationError: Its ending names no form, or one that cannot show a run.
    """
    form = form_of(path)
    if form in FORMATS and not FORMATS[form].overlays:
        raise ConfigurationError(f"the form {form!r} cannot show a run; draw it as {endings('svg')[0]}, for instance")


def draw_run(story: Story, path: Path) -> Path:
    """Draw the way that a run took: counts at the rows, the rest stands back.

    Args:
        story: The run.
        path: Where to; its ending names the form, and its folder is made.

    Raises:
        ConfigurationError: The ending names no form, or what the form needs is not installed.
    """
    overlay = RunPath.of((d.transition.id for d in story.decisions), str(story.result.state))
    path.parent.mkdir(parents=True, exist_ok=True)
    return write(story.result.graph, path, overlay=overlay)
