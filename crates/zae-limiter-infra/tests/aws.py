"""A local AWS: ministack from PyPI, on the loopback interface only, with what it lacks for the stack.

    $(tests/venv ministack==1.5.33 boto3 cbor2 cryptography)/bin/python tests/aws.py PORT

ministack supports no alarms on expressions: this script makes them alarms on their first metric. ministack
replaces a table that exists already: here that fails, as in AWS. It ends when its standard input closes, so
that it does not outlive a test.
"""
import os
import sys
import threading

port = sys.argv.pop(1)
os.environ.update(
    BIND_HOST="127.0.0.1",
    GATEWAY_PORT=port,
    SERVICES="cloudformation,cloudwatch,dynamodb,dynamodbstreams,iam,lambda,logs,monitoring,s3,sqs,sts",
    # Functions that run in it must call this endpoint.
    AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}",
    IOT_MTLS_ENABLED="0",
    # Nothing here calls out.
    AWS_EC2_METADATA_DISABLED="true",
)


def end_with_stdin():
    sys.stdin.buffer.read()
    os._exit(0)


threading.Thread(target=end_with_stdin, daemon=True).start()

from ministack import app  # noqa: E402
from ministack.services.cloudformation import provisioners  # noqa: E402

metric_alarm = provisioners._cw_metric_alarm_record


def any_alarm(name, props):
    metrics = props.get("Metrics")
    if metrics:
        first = next(one["MetricStat"] for one in metrics if "MetricStat" in one)
        props = {key: value for key, value in props.items() if key != "Metrics"}
        props.update(first["Metric"], Period=first["Period"], Statistic=first["Stat"])
    return metric_alarm(name, props)


provisioners._cw_metric_alarm_record = any_alarm

table = provisioners._RESOURCE_HANDLERS["AWS::DynamoDB::Table"]
create_table = table["create"]


def create_new_table(logical_id, props, stack_name):
    name = props["TableName"]
    if name in provisioners._dynamodb._tables:
        raise ValueError(f"{name} already exists")
    return create_table(logical_id, props, stack_name)


table["create"] = create_new_table
app.main()
