"""Withholds secrets from a text that comes in pieces, a secret over several pieces included."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from agentfsm.loop.escapes import Reading, ends_in_escape, has_escapes

SHORT = 4  # characters below which a secret counts only if no letter or digit is beside it
_MAX_HEAD = 4  # characters of a secret that make a piece wait
_CONTEXT = 3  # characters that were shown and may be the beginning of a secret
_ESCAPED_CONTEXT = 40  # the same where each may be an escape


class SecretIndex:
    """Where secrets are in a text, and where one may begin that continues in the next piece.

    Of a secret of 16 characters or more, three may be shown before it is noticed, of a shorter one fewer than a
    quarter: else every piece that ends in a letter would have to wait for the next one.
    """

    def __init__(self, forms: Iterable[str]) -> None:
        by_head: dict[int, dict[str, list[str]]] = {}
        for form in sorted(forms, key=len, reverse=True):
            length = min(_MAX_HEAD, max(1, len(form) // 4))
            by_head.setdefault(length, {}).setdefault(form[:length], []).append(form)
        self._by_head = tuple(by_head.items())

    def __bool__(self) -> bool:
        return bool(self._by_head)

    def search(self, text: str, *, complete: bool) -> tuple[list[tuple[int, int]], int]:
        """Where secrets stand in a text, from left to right, and from where on it is not decided yet."""
        spans: list[tuple[int, int]] = []
        done = 0
        for place in self._places_of_heads(text):
            if place < done:
                continue
            end = self._end_of_match(text, place, complete)
            if end is None:
                return spans, place
            if end > place:
                spans.append((place, end))
                done = end
        return spans, len(text)

    def _places_of_heads(self, text: str) -> list[int]:
        found = [
            place
            for length, forms in self._by_head
            for place in range(len(text) - length + 1)
            if text[place : place + length] in forms
        ]
        return sorted(found) if len(found) > 1 else found

    def _end_of_match(self, text: str, place: int, complete: bool) -> int | None:
        """The end of the longest secret at a place; the place itself if there is none; None if one may begin there."""
        longest = place
        for length, forms in self._by_head:
            for form in forms.get(text[place : place + length], ()):
                end = place + len(form)
                if not complete and end > len(text) - (len(form) < SHORT) and form.startswith(text[place:end]):
                    return None
                if end > longest and text.startswith(form, place) and _stands_alone(text, place, end):
                    longest = end
        return longest


def _stands_alone(text: str, start: int, end: int) -> bool:
    """Whether a short secret is not part of a word."""
    if end - start >= SHORT:
        return True
    return not (start and text[start - 1].isalnum()) and not (end < len(text) and text[end].isalnum())


class PieceFilter:
    """What others may see of each piece of a text.

    Args:
        forms: The secrets as they stand in texts.
        readings: What they say, in UTF-8, one character for each byte: for pieces with escapes.
        mask: What stands for a secret.
        receive: Gets what may be seen of each piece, in order, as soon as that is decided.
    """

    def __init__(self, forms: SecretIndex, readings: SecretIndex, mask: str, receive: Callable[[str], None]) -> None:
        self._forms, self._readings, self._mask, self._receive = forms, readings, mask, receive
        self._text = ""  # what was shown last, and what is not decided yet
        self._done = 0  # how much of it was shown
        self._ends: list[int] = []  # of the pieces in it that are not decided
        self._shown = ""  # of the first of these

    @property
    def waits(self) -> bool:
        """Whether a piece was added of which it is not decided what may be seen."""
        return bool(self._ends)

    def add(self, piece: str) -> None:
        """Add the next piece."""
        self._text += piece
        self._ends.append(len(self._text))
        self._decide(complete=False)

    def finish(self) -> None:
        """Decide about what is left: the text is complete."""
        if self._ends:
            self._decide(complete=True)
        self._text, self._done = "", 0

    def _decide(self, *, complete: bool) -> None:
        text = self._text
        spans, limit = self.search(text, complete=complete)
        limit, place = max(limit, self._done), self._done
        for start, end in [*((s, e) for s, e in spans if e > place and s < limit), (limit, limit)]:
            self._show(place, max(place, start))
            if end > max(place, start):
                self._shown += self._mask
                self._show(end, end)
            place = max(place, end)
        kept = _ESCAPED_CONTEXT if has_escapes(text[max(0, place - _ESCAPED_CONTEXT) : place]) else _CONTEXT
        cut = max(0, place - kept)
        self._text, self._done = text[cut:], place - cut
        self._ends = [end - cut for end in self._ends]

    def _show(self, start: int, end: int) -> None:
        """Show a part of the text as it is, each piece of it where it belongs."""
        while self._ends and self._ends[0] <= end:
            self._shown += self._text[start : self._ends[0]]
            start = max(start, self._ends[0])
            self._next_piece()
        self._shown += self._text[start:end]

    def _next_piece(self) -> None:
        del self._ends[0]
        shown, self._shown = self._shown, ""
        self._receive(shown)

    def search(self, text: str, *, complete: bool) -> tuple[list[tuple[int, int]], int]:
        """Where secrets stand in a text, from left to right, and from where on it is not decided yet."""
        spans, limit = self._forms.search(text, complete=complete)
        if not self._readings or not (has_escapes(text) or (not complete and ends_in_escape(text))):
            return spans, limit
        reading = Reading(text)
        plain = reading.plain.decode("latin-1")
        unfinished = None if complete else reading.unfinished
        found, hold = self._readings.search(plain if unfinished is None else plain[:unfinished], complete=complete)
        spans = sorted({*spans, *(reading.span(start, end) for start, end in found)})
        if hold < len(plain):
            limit = min(limit, reading.span(hold, hold + 1)[0])
        return spans, limit
