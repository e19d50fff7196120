"""What libraries say while a command runs: nothing, save what concerns the reader."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import click

from treegraft.errors import DrafterWarning, SchedulerWarning


@contextmanager
def quiet() -> Iterator[None]:
    """Keep warnings and logs of libraries back; show treegraft's own as a line on stderr once the text is out."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        for own in (DrafterWarning, SchedulerWarning):
            warnings.simplefilter("always", own)
        try:
            yield
        finally:
            for line in dict.fromkeys(str(warning.message) for warning in caught):
                click.echo(f"warning: {line}", err=True)
