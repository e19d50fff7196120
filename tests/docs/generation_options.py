"""The page docs/generation_options.md, made from the table in the code.

python tests/docs/generation_options.py      writes it
"""

from pathlib import Path

from treegraft_plugins.hf.generation_options import GENERATION_OPTIONS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "generation_options.md"

_HEAD = """\
# Generation options

What becomes of every option of transformers' `GenerationConfig` in `treegraft.generate(model, inputs, pipeline=...)`
and `model.generate(**inputs, custom_generate=pipeline)`. An option counts wherever transformers reads it: as an
argument, in a `generation_config` that is passed, or in the model's own.

- **Honoured**: the text is what `generate` without a pipeline would give, or with sampling has its distribution.
- **Refused**: a value that asks for something is an error that names the option, before anything is computed.
- **Unread**: an option of a mode that is refused; as in `generate` outside that mode, nothing reads it.

The table comes from the code that refuses (`python tests/docs/generation_options.py` writes this page), and a test
compares it with the options of the installed transformers. In Python:

```python
from treegraft_plugins.hf.generation_options import GENERATION_OPTIONS

print(GENERATION_OPTIONS["num_beams"].status, "-", GENERATION_OPTIONS["num_beams"].note)
```

How-to pages: [sampling](how-to/sampling.md), [stopping](how-to/stopping.md), [streaming](how-to/streaming.md),
[several rows](how-to/rows.md), [structured output](how-to/structured.md), [quantised models](how-to/quantised.md).
"""
_HEADINGS = {"honoured": "Honoured", "refused": "Refused", "unread": "Unread"}


def page() -> str:
    """The page as it should be."""
    parts = [_HEAD]
    for status, heading in _HEADINGS.items():
        columns = ("option", "values that ask for nothing", "why") if status == "refused" else ("option", "note")
        parts.append(f"\n## {heading}\n\n| {' | '.join(columns)} |\n|{' --- |' * len(columns)}\n")
        for name, option in GENERATION_OPTIONS.items():
            if option.status == status:
                neutral = [", ".join(f"`{value!r}`" for value in option.neutral)] if status == "refused" else []
                parts.append(f"| {' | '.join([f'`{name}`', *neutral, option.note])} |\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
