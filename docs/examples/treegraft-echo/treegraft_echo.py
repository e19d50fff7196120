"""A drafter for text that repeats itself: it expects the token that stood `lag` places back."""

import attrs

import treegraft


@attrs.define(eq=False)
class EchoDrafter(treegraft.Drafter):
    lag: int = attrs.field(default=3, validator=[attrs.validators.instance_of(int), attrs.validators.ge(1)])

    def draft(self, request):
        contexts = {node: request.context(node) for node in request.positions.tolist()}
        return treegraft.Expansion.from_rows(
            {node: [(int(tokens[-self.lag]), -0.7)] for node, tokens in contexts.items() if len(tokens) >= self.lag}
        )


@treegraft.hookimpl
def treegraft_register(register):
    register("echo", EchoDrafter)
