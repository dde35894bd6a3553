"""A local AWS that enforces IAM on DynamoDB: moto from PyPI, on the loopback interface only.

    $(tests/venv 'moto[server,dynamodb,cloudformation,iam]==5.2.5')/bin/python tests/iam.py PORT

moto checks actions, but neither partition keys nor the operations of a transaction. This script checks both,
for users with their own access key. The key `test` may do everything. moto is not safe for concurrent calls,
so this script runs the calls on tables one after the other. It ends when its standard input closes, so that
it does not outlive a test.
"""
import fnmatch
import json
import os
import sys
import threading

from moto import settings
from moto.core.authorization import ActionAuthenticatorMixin
from moto.core.exceptions import JsonRESTError
from moto.dynamodb.responses import DynamoHandler
from moto.iam.access_control import IAMPolicy, IAMRequest

# moto works out an update by recursion, once for every attribute that it sets.
sys.setrecursionlimit(10_000)

TAG = "zael_namespace_id"
PARTS = {
    "ConditionCheck": "ConditionCheckItem",
    "Delete": "DeleteItem",
    "Put": "PutItem",
    "Update": "UpdateItem",
}


def partition(item):
    return item["PK"]["S"]


def needs(operation, body):
    """What a call needs: the action, the table or index, and the partition keys."""
    if operation == "TransactWriteItems":
        for part in body["TransactItems"]:
            (kind, change), = part.items()
            key = change.get("Key") or change["Item"]
            yield PARTS[kind], change["TableName"], [partition(key)]
    elif operation == "BatchGetItem":
        for table, asked in body["RequestItems"].items():
            yield operation, table, [partition(key) for key in asked["Keys"]]
    elif operation == "BatchWriteItem":
        for table, writes in body["RequestItems"].items():
            parts = [part for write in writes for part in write.values()]
            yield operation, table, [partition(p.get("Key") or p["Item"]) for p in parts]
    elif operation == "Query":
        index = body.get("IndexName")
        resource = body["TableName"] + (f"/index/{index}" if index else "")
        yield operation, resource, [body["ExpressionAttributeValues"][":pk"]["S"]]
    else:
        key = body.get("Key") or body.get("Item")
        yield operation, body.get("TableName", "*"), [partition(key)] if key else []


def listed(value):
    return value if isinstance(value, list) else [value]


def meets(condition, keys, tag):
    for operator, wanted in condition.items():
        assert list(wanted) == ["dynamodb:LeadingKeys"], condition
        patterns = listed(wanted["dynamodb:LeadingKeys"])
        if operator == "Null":
            if (not keys) != (patterns == ["true"]):
                return False
            continue
        assert operator == "ForAllValues:StringLike", condition
        # A variable without a value matches nothing.
        patterns = [p.replace("${aws:PrincipalTag/" + TAG + "}", tag or "\0") for p in patterns]
        if not all(any(fnmatch.fnmatchcase(key, p) for p in patterns) for key in keys):
            return False
    return True


def allows(policy, action, arn, keys, tag):
    for statement in listed(policy["Statement"]):
        assert statement["Effect"] == "Allow", statement
        if (
            any(fnmatch.fnmatchcase(action, one) for one in listed(statement["Action"]))
            and any(fnmatch.fnmatchcase(arn, one) for one in listed(statement["Resource"]))
            and meets(statement.get("Condition", {}), keys, tag)
        ):
            return True
    return False


def authorize(self, resource="*"):
    if "Credential=test/" in self.headers.get("Authorization", ""):
        return
    operation = self.headers["X-Amz-Target"].split(".")[-1]
    request = IAMRequest(
        account_id=self.current_account,
        method=self.method,
        path=self.raw_path,
        data=self.data,
        body=self.raw_body,
        headers=self.headers,
        action=operation,
    )
    request.check_signature()
    key = request._access_key
    user = request.backend.get_user(key._owner_user_name)
    tags = request.backend.tagger.get_tag_dict_for_resource(user.arn)
    policies = [IAMPolicy(one)._policy_json for one in key.collect_policies()]
    for action, table, keys in needs(operation, json.loads(self.raw_body or b"{}")):
        arn = f"arn:aws:dynamodb:{self.region}:{self.current_account}:table/{table}"
        action = f"dynamodb:{action}"
        if not any(allows(policy, action, arn, keys, tags.get(TAG)) for policy in policies):
            denied = JsonRESTError("AccessDeniedException", f"{user.name}: {action} on {arn}")
            denied.code = 400
            raise denied


DynamoHandler._authenticate_and_authorize_normal_action = authorize
call_action = DynamoHandler.call_action
turn = threading.RLock()


def one_at_a_time(self):
    with turn:
        return call_action(self)


DynamoHandler.call_action = one_at_a_time
# Everything else is for whoever deploys.
settings.INITIAL_NO_AUTH_ACTION_COUNT = float("inf")
ActionAuthenticatorMixin.request_count = 0


def end_with_stdin():
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    from moto.server import main

    threading.Thread(target=end_with_stdin, daemon=True).start()
    main(["-H", "127.0.0.1", "-p", sys.argv[1]])
