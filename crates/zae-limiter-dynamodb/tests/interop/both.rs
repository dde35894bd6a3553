//! Both clients on one namespace of one table, in the same time.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use aws_sdk_dynamodb::types::AttributeValue;
use serde_json::{Value, json};
use tokio::sync::OnceCell;
use zae_limiter_core::{
    Clock as _, Error, Lease, Limit, LimitSet, LimitStatus, ManualClock, RateLimiter, Timestamp,
};
use zae_limiter_dynamodb::aws::AwsTable;
use zae_limiter_dynamodb::{DynamoOptions, DynamoStore};

use crate::python::Release;
use crate::server;

/// Who has created the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Ours,
    Theirs,
}

pub(crate) struct Both {
    pub(crate) release: Release,
    pub(crate) kind: Kind,
    pub(crate) table: String,
    pub(crate) namespace: String,
    pub(crate) clock: Arc<ManualClock>,
    pub(crate) ours: RateLimiter,
}

static TABLES: [OnceCell<String>; 4] = [const { OnceCell::const_new() }; 4];

async fn table_of(release: Release, kind: Kind) -> String {
    let create = async || match kind {
        Kind::Ours => server::new_table().await.name().to_owned(),
        Kind::Theirs => {
            let name = format!("python-{}", release as usize);
            release.call(&json!({"op": "create_table", "table": name})).unwrap();
            name
        }
    };
    TABLES[release as usize * 2 + kind as usize].get_or_init(create).await.clone()
}

/// A store that asks the table before it refuses: the other client may have refunded.
pub(crate) fn store(endpoint: &str, table: &str) -> DynamoStore {
    // The tests move a clock of their own.
    let options = DynamoOptions::default().max_clock_skew(Duration::ZERO);
    let options = options.local_refusal(Duration::ZERO);
    let table = AwsTable::new(server::client_at(endpoint), table, server::clock());
    DynamoStore::new(Arc::new(table), options)
}

impl Both {
    pub(crate) async fn on(release: Release, kind: Kind, namespace: &str) -> Self {
        let table = table_of(release, kind).await;
        // Whole seconds are what Python's clock can say exactly.
        let now = server::clock().now().as_millis() / 1_000 * 1_000;
        let clock = Arc::new(ManualClock::new(Timestamp::from_millis(now)));
        let namespace = namespace.replace('_', "-");
        let open = |name: &str| {
            RateLimiter::builder(store(&server::endpoint(), &table))
                .namespace(name)
                .clock(Arc::clone(&clock) as Arc<_>)
                .principal("rust")
                .cache_ttl(Duration::ZERO)
                .open()
        };
        let default = open("default").await.unwrap();
        default.namespaces().register(&namespace).await.unwrap();
        let ours = open(&namespace).await.unwrap();
        Self { release, kind, table, namespace, clock, ours }
    }

    /// What Python answers.
    pub(crate) fn python(&self, op: &str, more: Value) -> Value {
        self.try_python(op, more).unwrap_or_else(|error| panic!("{op}: {error}"))
    }

    pub(crate) fn try_python(&self, op: &str, mut more: Value) -> Result<Value, String> {
        more["op"] = op.into();
        more["table"] = self.table.as_str().into();
        more["namespace"] = self.namespace.as_str().into();
        more["now"] = self.clock.now().as_millis().into();
        self.release.call(&more)
    }

    pub(crate) fn pass(&self, seconds: u64) {
        self.clock.advance(Duration::from_secs(seconds));
    }

    /// A lease of ours, if it is admitted.
    pub(crate) async fn lease(&self, entity: &str, take: &[(&str, u64)]) -> Option<Lease> {
        let acquire = self.ours.acquire(entity, "gpt-4");
        match take.iter().fold(acquire, |acquire, (limit, n)| acquire.take(limit, *n)).await {
            Ok(lease) => Some(lease),
            Err(Error::Exceeded(_)) => None,
            Err(error) => panic!("{error}"),
        }
    }

    /// Whether ours admits it.
    pub(crate) async fn take(&self, entity: &str, tokens: u64) -> bool {
        match self.lease(entity, &[("rpm", tokens)]).await {
            Some(lease) => lease.commit().await.map(|()| true).unwrap(),
            None => false,
        }
    }

    /// Whether Python admits it.
    pub(crate) fn python_takes(&self, entity: &str, tokens: u64) -> bool {
        let more = json!({"entity": entity, "resource": "gpt-4", "take": {"rpm": tokens}});
        match self.try_python("acquire", more) {
            Ok(admitted) => admitted == true,
            // It stumbles over its own reserved limit when it says that a parent refuses.
            Err(error) if self.release == Release::V0_10_3 && error.contains("'wcu'") => false,
            Err(error) => panic!("acquire: {error}"),
        }
    }

    /// Opens a lease of Python's.
    pub(crate) fn python_begins(&self, entity: &str, tokens: u64) -> bool {
        let take = json!({"rpm": tokens});
        let more = json!({"lease": entity, "entity": entity, "resource": "gpt-4", "take": take});
        self.python("begin", more) == true
    }

    /// What both say is there: they must agree.
    pub(crate) async fn available(&self, entity: &str) -> i64 {
        let statuses = self.ours.available(entity, "gpt-4", &[]).await.unwrap();
        let is_asked = |s: &&LimitStatus| s.level == 0 && s.limit_name.as_str() == "rpm";
        let ours = statuses.iter().find(is_asked).unwrap().available.get().div_euclid(1_000);
        let python = self.python("available", json!({"entity": entity, "resource": "gpt-4"}));
        assert_eq!(python["rpm"], ours, "what is available to {entity}");
        ours
    }

    /// The numbers of a bucket's item.
    pub(crate) async fn numbers(&self, entity: &str) -> BTreeMap<String, i64> {
        let item = self.item(entity).await.into_iter();
        item.filter_map(|(name, value)| Some((name, value.as_n().ok()?.parse().ok()?))).collect()
    }

    fn key(&self, entity: &str) -> HashMap<String, AttributeValue> {
        let pk = format!("{}/BUCKET#{entity}#gpt-4#0", self.ours.namespace_id());
        let text = |text: String| AttributeValue::S(text);
        HashMap::from([("PK".to_owned(), text(pk)), ("SK".to_owned(), text("#STATE".to_owned()))])
    }

    pub(crate) async fn item(&self, entity: &str) -> BTreeMap<String, AttributeValue> {
        let client = server::client();
        let get = client.get_item().table_name(&self.table).consistent_read(true);
        let found = get.set_key(Some(self.key(entity))).send().await.unwrap();
        found.item.unwrap_or_default().into_iter().collect()
    }

    /// Changes a bucket's item behind everybody's back.
    pub(crate) async fn put_number(&self, entity: &str, name: &str, number: i64) {
        let client = server::client();
        let update = client.update_item().table_name(&self.table).set_key(Some(self.key(entity)));
        let update = update.update_expression("SET #n = :v").expression_attribute_names("#n", name);
        let number = AttributeValue::N(number.to_string());
        update.expression_attribute_values(":v", number).send().await.unwrap();
    }

    pub(crate) fn clock_ms(&self) -> i64 {
        self.clock.now().as_millis()
    }

    /// The balance in millitokens, as the table has it.
    pub(crate) async fn balance(&self, entity: &str) -> i64 {
        self.numbers(entity).await["b_rpm_tk"]
    }
}

/// So many, all of them within a minute, refilled at so many a minute.
pub(crate) fn rpm(capacity: u64, a_minute: u64) -> Limit {
    Limit::per_minute("rpm", a_minute).burst(capacity)
}

/// Limits as JSON, as the Python driver reads and writes them.
pub(crate) fn limits_json(limits: &LimitSet) -> Value {
    let whole = |milli: i64| milli / 1_000;
    let limits = limits.iter().map(|(name, rate)| {
        let period = rate.period_ms() / 1_000;
        let (capacity, amount) = (rate.capacity().get(), rate.refill_amount().get());
        json!([name.as_str(), whole(capacity), whole(amount), period])
    });
    limits.collect()
}

pub(crate) fn json_of(limits: impl IntoIterator<Item = Limit>) -> Value {
    limits_json(&LimitSet::new(limits).unwrap())
}
