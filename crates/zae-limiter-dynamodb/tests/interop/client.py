"""Drives the Python client of zae-limiter: one request a line on standard input, one answer a line
on standard output, both JSON, in order. Ends with its input.

    python client.py ENDPOINT

Every request says what it wants ("op", a function below), in which table and namespace ("table",
"namespace"), and what time it is there ("now", milliseconds). What else it says is handed to the
function. An answer is {"ok": ...} or {"error": the exception's class, "message": ...}.
"""

import asyncio
import json
import os
import sys
import time
import warnings
from importlib import resources

warnings.simplefilter("ignore")
os.environ.update(
    AWS_ACCESS_KEY_ID="AKIAIOSFODNN7EXAMPLE",
    AWS_SECRET_ACCESS_KEY="local",
    AWS_DEFAULT_REGION="us-east-1",
    AWS_EC2_METADATA_DISABLED="true",
)

import yaml  # noqa: E402
from zae_limiter import (  # noqa: E402
    Limit,
    OnUnavailable,
    RateLimiter,
    RateLimitExceeded,
    Repository,
    StackOptions,
    __version__,
)

WHO = {"principal": "python"}


class GivenUp(Exception):
    """What makes a lease roll back."""


class Template(yaml.SafeLoader):
    """A CloudFormation template, whose functions do not matter here."""


Template.add_multi_constructor("!", lambda loader, suffix, node: None)


def limits(told):
    return [
        Limit.custom(name, capacity=capacity, refill_amount=amount, refill_period_seconds=period)
        for name, capacity, amount, period in told
    ]


def told(limits):
    return sorted(
        [limit.name, limit.capacity, limit.refill_amount, limit.refill_period_seconds]
        for limit in limits
    )


class Client:
    """The client on one namespace of one table."""

    def __init__(self, repository):
        self.repository = repository
        self.limiter = RateLimiter(repository=repository)
        self.leases = {}

    @classmethod
    async def open(cls, endpoint, table, namespace):
        options = dict(
            stack=table, region="us-east-1", endpoint_url=endpoint, config_cache_ttl=0
        )
        try:
            # Later releases remember refusals, too.
            repository = await Repository.open(namespace, rejection_cache_ttl=0, **options)
        except TypeError:
            repository = await Repository.open(namespace, **options)
        return cls(repository)

    async def namespace_id(self):
        return self.repository.namespace_id

    # Entities.

    async def create_entity(self, entity, parent=None, cascade=False, name=None, metadata=None):
        await self.limiter.create_entity(
            entity, name=name, parent_id=parent, cascade=cascade, metadata=metadata, **WHO
        )

    async def entity(self, entity):
        found = await self.limiter.get_entity(entity)
        return found and [found.name, found.parent_id, found.cascade, found.metadata]

    async def children(self, entity):
        return sorted(child.id for child in await self.limiter.get_children(entity))

    async def delete_entity(self, entity):
        await self.limiter.delete_entity(entity, **WHO)

    # Stored limits.

    async def set_system(self, limits_, on_unavailable=None):
        choice = on_unavailable and OnUnavailable(on_unavailable)
        await self.limiter.set_system_defaults(limits(limits_), on_unavailable=choice, **WHO)

    async def system(self):
        found, choice = await self.limiter.get_system_defaults()
        return [told(found), choice and getattr(choice, "value", choice)]

    async def delete_system(self):
        await self.limiter.delete_system_defaults(**WHO)

    async def set_resource(self, resource, limits_):
        await self.limiter.set_resource_defaults(resource, limits(limits_), **WHO)

    async def resource(self, resource):
        return told(await self.limiter.get_resource_defaults(resource))

    async def delete_resource(self, resource):
        await self.limiter.delete_resource_defaults(resource, **WHO)

    async def resources(self):
        return [
            sorted(await self.limiter.list_resources_with_defaults()),
            sorted(await self.limiter.list_resources_with_entity_configs()),
        ]

    async def set_limits(self, entity, limits_, resource="_default_"):
        await self.limiter.set_limits(entity, limits(limits_), resource=resource, **WHO)

    async def limits(self, entity, resource="_default_"):
        return told(await self.limiter.get_limits(entity, resource=resource))

    async def delete_limits(self, entity, resource="_default_"):
        await self.limiter.delete_limits(entity, resource=resource, **WHO)

    async def entities_with_limits(self, resource="_default_"):
        found, _ = await self.limiter.list_entities_with_custom_limits(resource)
        return sorted(found)

    # Leases.

    async def begin(self, lease, entity, resource, take):
        """Whether it was admitted; if so, the lease stays open."""
        context = self.limiter.acquire(entity, resource, take)
        try:
            self.leases[lease] = (context, await context.__aenter__())
        except RateLimitExceeded:
            return False
        return True

    async def end(self, lease, adjust=None, give_up=False):
        context, held = self.leases.pop(lease)
        if adjust:
            await held.adjust(**adjust)
        if not give_up:
            await context.__aexit__(None, None, None)
            return
        try:
            error = GivenUp()
            await context.__aexit__(GivenUp, error, None)
        except GivenUp:
            pass

    async def acquire(self, entity, resource, take):
        try:
            async with self.limiter.acquire(entity, resource, take):
                return True
        except RateLimitExceeded:
            return False

    async def available(self, entity, resource):
        return await self.limiter.available(entity, resource)

    async def flood(self, entity, resource, take, tasks, share=None):
        """So many tasks that take until each has its share or is refused; how often they were
        admitted."""

        async def one():
            admitted = 0
            while admitted != share and await self.acquire(entity, resource, take):
                admitted += 1
            return admitted

        return sum(await asyncio.gather(*[one() for _ in range(tasks)]))

    async def capacity(self, resource, limit):
        """What all entities together have on a resource."""
        found = await self.limiter.get_resource_capacity(resource, limit)
        return [found.total_capacity, found.total_available, len(found.entities)]

    # Audit events, namespaces.

    async def audit(self, entity):
        """The events, newest first."""
        return [
            [event.action, event.principal, event.resource, event.details]
            for event in await self.limiter.get_audit_events(entity)
        ]

    async def set_retention(self, days):
        """As the original does when it deploys, but in the namespace in which it looks for it."""
        self.repository._stack_options = StackOptions(audit_retention_days=days)
        await self.repository._write_audit_retention_config()
        await self.start_anew()

    async def start_anew(self):
        """Forgets for how long events are kept, as another process would not know it."""
        self.repository._stack_options = None
        self.repository._audit_retention_days_cache = None

    async def register(self, name):
        return await self.repository.register_namespace(name)

    async def delete_namespace(self, name):
        await self.repository.delete_namespace(name)

    async def recover(self, id):
        return await self.repository.recover_namespace(id)

    async def namespaces(self):
        return {one["name"]: one["namespace_id"] for one in await self.repository.list_namespaces()}

    async def orphans(self):
        found = await self.repository.list_orphan_namespaces()
        return {one["namespace"]: one["namespace_id"] for one in found}


async def create_table(endpoint, table):
    """A table as this release defines it."""
    template = (resources.files("zae_limiter.infra") / "cfn_template.yaml").read_text()
    defined = yaml.load(template, Template)["Resources"]["RateLimitsTable"]["Properties"]
    names = ["AttributeDefinitions", "KeySchema", "GlobalSecondaryIndexes", "LocalSecondaryIndexes"]
    definition = {name: defined[name] for name in names if name in defined}
    repository = Repository(
        name=table, region="us-east-1", endpoint_url=endpoint, _skip_deprecation_warning=True
    )
    client = await repository._get_client()
    await client.create_table(TableName=table, BillingMode="PAY_PER_REQUEST", **definition)
    await client.update_time_to_live(
        TableName=table, TimeToLiveSpecification=defined["TimeToLiveSpecification"]
    )
    await repository.close()
    return sorted(definition)


async def main(endpoint):
    clients = {}

    async def carry_out(op, table, namespace=None, **rest):
        if op == "create_table":
            return await create_table(endpoint, table)
        if op == "version":
            return __version__
        if (table, namespace) not in clients:
            clients[table, namespace] = await Client.open(endpoint, table, namespace)
        return await getattr(clients[table, namespace], op)(**rest)

    real = time.time
    read = sys.stdin.readline
    while line := await asyncio.get_running_loop().run_in_executor(None, read):
        request = json.loads(line)
        now = request.pop("now", None)
        # All clients of a test live in the same time, which passes when the test says so.
        time.time = real if now is None else lambda now=now: now / 1000
        try:
            answer = {"ok": await carry_out(**request)}
        except Exception as error:
            answer = {"error": type(error).__name__, "message": str(error)[:1000]}
        print(json.dumps(answer), flush=True)
    for client in clients.values():
        await client.repository.close()


asyncio.run(main(sys.argv[1]))
