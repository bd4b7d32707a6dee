"""What one job holds of an engine's KV cache: blocks found, taken, offered to the prefix cache and given back.

A job holds ``units`` (findable prefix blocks, perhaps shared) and, for the other tokens it has computed, blocks of its
own; how many follows from ``computed``. Rules are vLLM 0.29's, see ``kv.py``. It must not decide whose turn it is.
"""

from __future__ import annotations

from autoscaling.simulator.engine_job import Job
from autoscaling.simulator.kv import KvCache
from autoscaling.simulator.spec import SimRequest


def blocks_for(tokens: int, block_tokens: int) -> int:
    """Blocks that hold ``tokens`` tokens."""
    return -(-tokens // block_tokens)


def check_request(request: SimRequest, tokens_max: int, block_tokens: int) -> None:
    """``ValueError``: its prompt is empty or leaves no room for a token, or its blocks do not fit the engine's."""
    if not 1 <= request.prompt_tokens < tokens_max:
        raise ValueError(f"a prompt of {request.prompt_tokens} tokens: 1..{tokens_max - 1} are possible")
    if request.block_tokens < 1 or (request.blocks and request.block_tokens % block_tokens):
        raise ValueError(f"prefix blocks of {request.block_tokens} tokens are no multiple of {block_tokens}")


def take_first(kv: KvCache, block_tokens: int, job: Job, budget: int, reserve: bool) -> int:
    """Find what the cache knows of a waiting job, and take the blocks of its first chunk of at most ``budget`` tokens.

    ``reserve``: only where the blocks of its whole text are available. Returns the tokens to compute; 0: no room, and
    nothing has changed.
    """
    request, unit_blocks = job.request, job.unit_blocks
    tokens = request.prompt_tokens + job.output_done
    found = kv.known(request.blocks, (tokens - 1) // request.block_tokens)
    units = list(request.blocks[:found])
    again = 0
    if job.left_over is not None and found == len(job.units):
        again = min(kv.left_over(job.left_over), (tokens - 1) // block_tokens - found * unit_blocks)
    computed = found * request.block_tokens + again * block_tokens
    if job.kv_ready and not job.preemptions:
        computed = tokens - 1
    count = min(tokens - computed, budget)
    held = found * unit_blocks
    needed = blocks_for(tokens if reserve else computed + count, block_tokens)
    if needed - held + kv.idle(units) * unit_blocks > kv.available:
        return 0
    kv.hold(units)
    if job.left_over is not None and kv.left_over(job.left_over):
        kv.reclaim(job.left_over, again)
    kv.take(blocks_for(computed + count, block_tokens) - held - again)
    job.left_over = None
    job.units, job.next_unit, job.computed = units, found, computed
    return count


def offer(kv: KvCache, job: Job, computed: int) -> None:
    """Prompt blocks that end within ``computed`` tokens can be found from now on."""
    request = job.request
    upto = min(len(request.blocks), computed // request.block_tokens)
    if job.next_unit < upto:
        job.units += [unit for unit in request.blocks[job.next_unit : upto] if kv.remember(unit)]
        job.next_unit = upto


def offer_output(kv: KvCache, job: Job) -> None:
    """A job is over: the blocks of its output can be found where their hashes are known."""
    request = job.request
    if request.blocks_after:
        upto = min(len(request.blocks_after), job.computed // request.block_tokens)
        job.units += [unit for unit in request.blocks_after[len(request.blocks) : upto] if kv.remember(unit)]


def give_back(kv: KvCache, block_tokens: int, job: Job) -> None:
    """Give the blocks of a job back. It finds those of its own again when it returns before others took them."""
    full, rest = divmod(job.computed, block_tokens)
    full -= len(job.units) * job.unit_blocks
    name = object() if full else None
    kv.release(name, job.units, job.unit_blocks, full, 1 if rest else 0)
    # Where a copy of a block known elsewhere lies in between, the own ones do not continue what would be found.
    job.left_over = name if len(job.units) == job.next_unit else None
