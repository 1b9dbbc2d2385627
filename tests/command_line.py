"""The command line, called in this process."""

from lockstep.cli import BAD_INPUT, main


def lockstep(*words, capsys=None):
    """The exit code; with capsys: (exit code, output, errors)."""
    code = main([str(w) for w in words])
    return (code, *capsys.readouterr()) if capsys else code


def refusal(*words, capsys):
    """The error of a command that is refused as bad input, in one line."""
    code, _, err = lockstep(*words, capsys=capsys)
    assert code == BAD_INPUT
    return " ".join(err.split())
