"""The Python client under load, in turns with others.

    python throughput.py ENDPOINT TABLE ENTITIES

Creates its buckets and prints its version. Each line on stdin holds the number of buckets, of
concurrent callers and of seconds. For each, it acquires as often as it can and prints the number of
calls, the seconds and the CPU seconds. Ends with its stdin.
"""

import asyncio
import os
import sys
import time
import warnings

warnings.simplefilter("ignore")
os.environ.update(
    AWS_ACCESS_KEY_ID="local",
    AWS_SECRET_ACCESS_KEY="local",
    AWS_DEFAULT_REGION="us-east-1",
    AWS_EC2_METADATA_DISABLED="true",
)

from zae_limiter import Limit, RateLimiter, Repository, __version__  # noqa: E402

SETUP_CALLERS = 16


async def acquire(limiter, entity):
    async with limiter.acquire(f"key-{entity}", "gpt-4", {"rpm": 1, "tpm": 10}):
        pass


async def create(limiter, entities):
    turn = asyncio.Semaphore(SETUP_CALLERS)

    async def one(entity):
        async with turn:
            await acquire(limiter, entity)

    await asyncio.gather(*[one(entity) for entity in range(entities)])


async def load(limiter, buckets, callers, seconds):
    calls, place = 0, 0
    end = time.perf_counter() + seconds

    async def caller():
        nonlocal calls, place
        while time.perf_counter() < end:
            place += 1
            await acquire(limiter, place * 7919 % buckets)
            calls += 1

    await asyncio.gather(*[caller() for _ in range(callers)])
    return calls


async def main(endpoint, table, entities):
    repository = await Repository.open(
        "python", stack=table, region="us-east-1", endpoint_url=endpoint
    )
    limiter = RateLimiter(repository=repository)
    limits = [Limit.per_minute("rpm", 100_000_000), Limit.per_minute("tpm", 10_000_000_000)]
    await limiter.set_system_defaults(limits)
    await create(limiter, int(entities))
    print(__version__, flush=True)
    read = sys.stdin.readline
    while line := await asyncio.get_running_loop().run_in_executor(None, read):
        buckets, callers, seconds = line.split()
        started, cpu = time.perf_counter(), time.process_time()
        calls = await load(limiter, int(buckets), int(callers), float(seconds))
        print(calls, time.perf_counter() - started, time.process_time() - cpu, flush=True)
    await repository.close()


try:
    import uvloop
except ImportError:
    pass
else:
    uvloop.install()
asyncio.run(main(*sys.argv[1:]))
