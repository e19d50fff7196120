"""What makes a comparison unfair, and how it is found.

Some of it is refused before anything is measured, some is found by probes, some in the records; `problems` collects
what makes a run invalid.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from treegraft.bench.arms import Arm, Request, Told
from treegraft.bench.records import Record
from treegraft.errors import RequestError, suggest

SHARED = ("steps", "verify_nodes", "width", "branching")
"""D, B, W and m: what arms that draft have in common, unless a run is to vary it."""
EXACT_DTYPES = ("float32", "float64")
"""Where texts must be equal; in half precision near-ties round differently in one-row and many-row forwards."""

# -- before anything is measured --------------------------------------------------------------------------------------


def shape(settings: Mapping[str, Any]) -> dict[str, Any]:
    """D, B, W and m of an arm's settings; W and m are those of all its sources."""

    def of_sources(key: str) -> list[Any]:
        ends = (name.startswith("sources.") and name.count(".") == 2 and name.endswith(f".{key}") for name in settings)
        return sorted({settings[name] for name, is_one in zip(settings, ends, strict=True) if is_one})

    return {
        "steps": settings["steps"], "verify_nodes": settings["verify_nodes"],
        "width": of_sources("width"), "branching": of_sources("branching"),
    }  # fmt: skip


def check_vary(names: Sequence[str]) -> None:
    """Refuse to vary what does not exist.

    Raises:
        RequestError: naming it.
    """
    for name in names:
        if name not in SHARED:
            raise RequestError(
                f"--vary {name}", "nothing to vary", f"Allowed: {', '.join(SHARED)}.", suggest(name, SHARED)
            )  # fmt: skip


def check_shared(arms: Sequence[Arm], vary: Sequence[str]) -> None:
    """Refuse arms of ours that differ in D, B, W or m where that is not what the run is about.

    Raises:
        RequestError: naming what differs.
    """
    shapes = {arm.name: shape(arm.settings()) for arm in arms if arm.is_ours and arm.drafts}
    for name in SHARED:
        values = {arm: found[name] for arm, found in shapes.items()}
        if name not in vary and len({str(value) for value in values.values()}) > 1:
            shown = ", ".join(f"{arm} {_shown(value)}" for arm, value in values.items())
            raise RequestError(
                "--arms", f"they differ in {name}: {shown}", "Allowed: the same for all that draft.",
                f"If that is what is compared, say so: --vary {name}.",
            )  # fmt: skip


def _shown(value: Any) -> str:
    return "/".join(map(str, value)) if isinstance(value, list) else str(value)


def ignored_options(arms: Sequence[Arm]) -> list[str]:
    """Options that an arm was made with and does not have: what was asked against what is read back."""
    found = []
    for arm in arms:
        live = arm.settings()
        for name, wanted in arm.asked().items():
            if name in live and live[name] != wanted and str(live[name]) != str(wanted):
                found.append(f"{arm.name}: {name} was to be {wanted!r} and is {live[name]!r}")
    return found


def kept_state(arm: Arm, once: tuple[list[int], Told], again: tuple[list[int], Told]) -> list[str]:
    """Whether a request took the same rounds before and after another one, decisions frozen."""
    (ids, told), (ids_again, told_again) = once, again
    if ids == ids_again and told.rounds is None:
        return []
    rounds, rounds_again = (_decisions(each) for each in (told, told_again))
    if ids == ids_again and rounds == rounds_again:
        return []
    return [
        f"{arm.name}: it keeps state between prompts: the same request took {len(rounds)} rounds, and after another "
        f"prompt {len(rounds_again)}, or other ones"
    ]  # fmt: skip


def _decisions(told: Told) -> list[Any]:
    return [
        (each.emitted, each.accepted, each.verified, each.drafted, each.source_calls) for each in told.rounds or ()
    ]  # fmt: skip


# -- a request --------------------------------------------------------------------------------------------------------


def counted(token_ids: Sequence[int], eos_ids: frozenset[int]) -> list[int]:
    """The ids that count, of any arm: up to and including the first EOS."""
    for index, token in enumerate(token_ids):
        if token in eos_ids:
            return list(token_ids[: index + 1])
    return list(token_ids)


def request_problems(
    arm: Arm, token_ids: Sequence[int], eos_ids: frozenset[int], request: Request, told: Told
) -> list[str]:
    """What is wrong with an answer: its length, or what it says that it ran with."""
    new = counted(token_ids, eos_ids)
    found = []
    if len(new) < len(token_ids):
        found.append(f"{len(token_ids) - len(new)} tokens after EOS")
    if len(new) > request.max_new_tokens:
        found.append(f"{len(new)} tokens where at most {request.max_new_tokens} were asked for")
    elif len(new) < request.max_new_tokens and not (new and new[-1] in eos_ids):
        found.append(f"it ended after {len(new)} of {request.max_new_tokens} tokens without EOS")
    asked: dict[str, Any] = {"max_new_tokens": request.max_new_tokens, "temperature": request.temperature}
    if arm.is_ours:
        asked |= {"seed": request.seed} | {
            name: value for name, value in arm.asked().items() if name in ("steps", "verify_nodes")
        }
    for name, wanted in asked.items():
        if name in told.settings and abs(told.settings[name] - wanted) > 1e-9:
            found.append(f"{name} was to be {wanted} and was {told.settings[name]}")
    if told.rounds is not None and sum(each.emitted for each in told.rounds) != len(token_ids):
        found.append(f"its rounds emitted {sum(each.emitted for each in told.rounds)} tokens, it says {len(token_ids)}")
    return found


# -- a run ------------------------------------------------------------------------------------------------------------


def problems(
    manifest: Mapping[str, Any], records: Sequence[Record], divergences: Sequence[Mapping[str, Any]]
) -> list[str]:
    """All that makes a run invalid, a sentence each; nothing for a fair one."""
    found = list(manifest.get("problems", ()))
    if manifest.get("dtype") in EXACT_DTYPES:
        found += _of_each_arm([(each["arm"], "its text differs") for each in divergences])
    found += _of_each_arm([(record.arm, text) for record in records for text in record.problems])
    found += _of_each_arm(
        [
            (record.arm, "another count than its ids")
            for record in records
            if record.num_new_tokens != len(record.token_ids)
        ]
    )
    found += _warm_ups(manifest)
    found += _unlike(manifest, records)
    cells = {arm: {record.cell for record in records if record.arm == arm} for arm in manifest.get("arms", ())}
    every = set().union(*cells.values()) if cells else set()
    found += [f"{arm}: {len(every - own)} requests are missing" for arm, own in cells.items() if own != every]
    return found


def _of_each_arm(found: Sequence[tuple[str, str]]) -> list[str]:
    """One sentence an arm: the first of its faults, and how many requests have one."""
    by_arm: dict[str, list[str]] = {}
    for arm, text in found:
        by_arm.setdefault(arm, []).append(text)
    return [
        f"{arm}: {texts[0]}" + (f" ({len(texts)} requests have a fault of this kind)" if len(texts) > 1 else "")
        for arm, texts in by_arm.items()
    ]  # fmt: skip


def _warm_ups(manifest: Mapping[str, Any]) -> list[str]:
    counts = {arm: manifest.get("warm_ups", {}).get(arm, 0) for arm in manifest.get("arms", ())}
    most = max(counts.values(), default=0)
    return [
        f"{arm}: measured after {count} warm-up requests, others after {most}" if most else f"{arm}: never warmed up"
        for arm, count in counts.items()
        if count < max(most, 1)
    ]  # fmt: skip


def _unlike(manifest: Mapping[str, Any], records: Sequence[Record]) -> list[str]:
    """Settings in which records differ that were to be compared."""
    found = []
    drafting = {arm for arm, settings in manifest.get("arm_settings", {}).items() if settings.get("drafts")}
    vary = manifest.get("settings", {}).get("vary") or ()
    of_a_request = {"max_new_tokens": True, "temperature": True, "steps": False, "verify_nodes": False}
    for name in (name for name in of_a_request if name not in vary):
        values: dict[Any, dict[Any, str]] = {}
        for record in records:
            own = record.settings_read_back
            if name in own and (of_a_request[name] or record.arm in drafting):
                cell = record.cell if of_a_request[name] else None
                values.setdefault(cell, {}).setdefault(own[name], record.arm)
        unlike = next((each for each in values.values() if len(each) > 1), None)
        if unlike is not None:
            found.append(f"arms differ in {name}: " + ", ".join(f"{arm} {value}" for value, arm in unlike.items()))
    return found
