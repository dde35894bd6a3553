"""Records usage with the Python aggregator, or reads it with the Python client.

    python usage.py ENDPOINT TABLE book|read

`book` hands the aggregator changes of the bucket of key-1 on gpt-4: 7 requests from 00:00 on and 20 from
09:00 on of one day, 11 from 10:00 on of the next. `read` prints what is booked, as [window, start, requests].
"""
import asyncio
import copy
import json
import os
import sys
import warnings
from datetime import datetime, timezone

warnings.simplefilter("ignore")
endpoint, table, what = sys.argv[1:]
os.environ.update(
    AWS_ACCESS_KEY_ID="test",
    AWS_SECRET_ACCESS_KEY="test",
    AWS_DEFAULT_REGION="us-east-1",
    AWS_EC2_METADATA_DISABLED="true",
    AWS_ENDPOINT_URL=endpoint,
)

import boto3  # noqa: E402
from zae_limiter import Repository  # noqa: E402
from zae_limiter_aggregator.processor import process_stream_records  # noqa: E402

BOOKED = [("2026-11-13T00:10", 7), ("2026-11-13T09:10", 20), ("2026-11-14T10:10", 11)]


async def open_repository():
    return await Repository.open("default", stack=table, region="us-east-1", endpoint_url=endpoint)


def book(namespace):
    client = boto3.client("dynamodb")
    key = {"PK": {"S": f"{namespace}/BUCKET#key-1#gpt-4#0"}, "SK": {"S": "#STATE"}}
    image = client.get_item(TableName=table, Key=key)["Item"]
    records = []
    for at, requests in BOOKED:
        old = copy.deepcopy(image)
        moment = datetime.fromisoformat(at).replace(tzinfo=timezone.utc)
        image["rf"] = {"N": str(int(moment.timestamp() * 1000))}
        image["b_rpm_tc"] = {"N": str(int(image["b_rpm_tc"]["N"]) + requests * 1000)}
        images = {"Keys": key, "OldImage": old, "NewImage": copy.deepcopy(image)}
        records.append({"eventName": "MODIFY", "dynamodb": images})
    result = process_stream_records(records, table, ["hourly", "daily"])
    assert not result.errors, result.errors


async def main():
    repository = await open_repository()
    if what == "book":
        book(repository.namespace_id)
    found, _ = await repository.get_usage_snapshots(entity_id="key-1", resource="gpt-4")
    rows = [[one.window_type, one.window_start, one.counters["rpm"]] for one in found]
    print(json.dumps(sorted(rows)))
    await repository.close()


# Its aggregator writes a log to standard output.
real, sys.stdout = sys.stdout, sys.stderr
printed = []
print = lambda line: printed.append(line)  # noqa: E731, A001
asyncio.run(main())
real.write(printed[-1] + "\n")
