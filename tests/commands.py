"""Commands in this process, for tests of what they do: one of its own takes seconds to import."""

import contextlib
import io

from dphybrid.cli.main import main


def command(*argv: str) -> str:
    """Run `dphybrid` with these words, which must end well; return what it prints."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(list(argv))
        except SystemExit as end:  # --help
            code = int(end.code or 0)
    assert code == 0, out.getvalue() + err.getvalue()
    return out.getvalue()
