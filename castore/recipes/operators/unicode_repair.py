"""Mappers that repair characters: wrongly decoded text, and punctuation of other scripts."""

from __future__ import annotations

from castore.errors import InvalidValueError
from castore.recipes.operators.base import Mapper, NeedsMoreError

_FORMS = ("NFC", "NFKC", "NFD", "NFKD")


class FixUnicodeMapper(Mapper):
    """Repairs wrongly decoded text, and gives it one Unicode form, with the package ftfy.

    Args:
        normalization: ``"NFC"`` (also null), ``"NFKC"``, ``"NFD"`` or ``"NFKD"``.
        text_key: the column of the text.

    Raises:
        InvalidValueError: there is no such form, or ftfy is not installed.

    >>> FixUnicodeMapper().process({"text": "GrÃ¼ÃŸe"})
    {'text': 'Grüße'}
    """

    def __init__(self, normalization: str | None = None, *, text_key: str = "text") -> None:
        super().__init__(text_key=text_key)
        self.normalization = (normalization or "NFC").upper()
        if self.normalization not in _FORMS:
            raise InvalidValueError(f"normalization={normalization!r} is not one of {', '.join(_FORMS)}")
        try:
            import ftfy
        except ImportError:
            raise NeedsMoreError(
                "fix_unicode_mapper needs the package ftfy, which is not installed; pip install ftfy"
            ) from None
        # Releases of ftfy repair differently, so the release counts in the key.
        self.ftfy = str(ftfy.__version__)

    def clean(self, text: str) -> str:
        """The repaired text."""
        import ftfy

        return ftfy.fix_text(text, normalization=self.normalization)


class PunctuationNormalizationMapper(Mapper):
    """Replaces punctuation of other scripts, and of typographers, by that of ASCII.

    >>> PunctuationNormalizationMapper().process({"text": "「你好」，世界！ “yes” — no…"})
    {'text': '"你好",世界! "yes"  -  no...'}
    """

    def clean(self, text: str) -> str:
        """The text with plain punctuation only."""
        return text.translate(_PLAIN)


_PLAIN = str.maketrans(
    {
        **dict.fromkeys("„“”«»「」《》", '"'),
        **dict.fromkeys("´’", "'"),
        **dict.fromkeys("，、", ","),
        **dict.fromkeys("∶：", ":"),
        **dict.fromkeys("–━►", "-"),
        **dict(zip("。？！；（）【】〈〉％～", ".?!;()[]<>%~", strict=True)),
        "—": " - ",
        "．": ". ",
        "…": "...",
    }
)
