"""Text of others that is to be shown: names of files and classes must not steer a terminal or turn a line around."""

import unicodedata

# Control, surrogate, private and unassigned characters, ends of lines and paragraphs.
_UNSEEN = {"Cc", "Cs", "Co", "Cn", "Zl", "Zp"}
# Of the invisible marks ("Cf"), those that join letters belong to words of several scripts, and to emoji.
_JOINERS = "\u200c\u200d"


def printable(text: str, keep: str = "") -> str:
    r"""A text with what cannot be seen escaped: the control character ESC becomes `\x1b`.

    Args:
        text: any text.
        keep: characters to leave as they are.
    """
    if text.isprintable():
        return text
    return "".join(_escaped(sign) if sign not in keep and _unseen(sign) else sign for sign in text)


def _unseen(sign: str) -> bool:
    category = unicodedata.category(sign)
    return category in _UNSEEN or (category == "Cf" and sign not in _JOINERS)


def _escaped(sign: str) -> str:
    return sign.encode("unicode_escape", "backslashreplace").decode()
