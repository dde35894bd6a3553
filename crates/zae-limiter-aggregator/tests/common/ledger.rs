//! What the buckets of a simulated table have counted, to compare usage records with.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use super::NOW;
use zae_limiter_core::{BoxFuture, Key, Record, StoreError, Target, Timestamp, UsageKey, Window};
use zae_limiter_dynamodb::{DynamoOptions, DynamoStore};
use zae_limiter_schema::{Item, ItemKey, ParsedKey, Value, parse_key, records};
use zae_limiter_testkit::{Changed, Harsh, Reshard, SimTable, Simulation};

/// How much faster the time of a stretched stream passes than the clients'.
const STRETCH: u64 = 90;

/// The aggregator's calls time out after five seconds, so they may hang like those of the clients.
/// It starts no tasks on the table's runtime: the ended tasks are the clients'.
pub(crate) const HARSH: Harsh = Harsh { hung_calls: true, ended_tasks: true, deletions: false };

/// A record of the stream.
#[derive(Clone, Debug)]
pub(crate) struct Sent {
    pub(crate) number: u64,
    pub(crate) at: Timestamp,
    pub(crate) changed: Changed,
}

impl Sent {
    pub(crate) fn new(number: u64, changed: Changed) -> Self {
        let at = NOW.saturating_add_millis(changed.at_us / 1_000);
        Self { number, at, changed }
    }

    /// In a stream whose time passes faster than the clients', so that minutes of work fill days.
    pub(crate) fn stretched(number: u64, changed: Changed) -> Self {
        let at = NOW.saturating_add_millis(changed.at_us * STRETCH / 1_000);
        Self { number, at, changed }
    }
}

pub(crate) fn number_of(key: &ItemKey) -> u64 {
    let mut hasher = DefaultHasher::new();
    key.hash(&mut hasher);
    hasher.finish()
}

/// Millitokens by limit, and events.
pub(crate) type Totals = BTreeMap<UsageKey, (BTreeMap<String, i64>, u64)>;

/// The totals of all usage records in the table.
pub(crate) fn booked(table: &SimTable) -> Totals {
    let mut totals = Totals::new();
    for item in table.items() {
        let text = |name: &str| item[name].as_str().unwrap().to_owned();
        let Some(ParsedKey::Record(Key::Usage(key))) =
            parse_key(&ItemKey::new(text("PK"), text("SK")))
        else {
            continue;
        };
        let record = records::decode(&Key::Usage(key.clone()), &item).unwrap();
        let Some(Record::Usage(usage)) = record else { panic!("not a usage record: {item:?}") };
        let consumed = usage.consumed.iter().map(|(name, sum)| (name.to_string(), sum.get()));
        let consumed = consumed.filter(|(_, sum)| *sum != 0).collect();
        totals.insert(key, (consumed, usage.events));
    }
    totals
}

/// The totals that the buckets have counted. Computed from the new images alone, so that old images
/// are not trusted.
pub(crate) fn ledger(all: &[Sent]) -> Totals {
    let mut counts: BTreeMap<ItemKey, BTreeMap<String, i64>> = BTreeMap::new();
    let mut totals = Totals::new();
    for sent in all {
        let bucket = match parse_key(&sent.changed.key) {
            Some(ParsedKey::Record(Key::Bucket(bucket))) => bucket,
            Some(ParsedKey::Shard(shard)) => shard.bucket,
            _ => continue,
        };
        let after = sent.changed.new.as_ref().map(counts_of).unwrap_or_default();
        let before = counts.insert(sent.changed.key.clone(), after.clone()).unwrap_or_default();
        let differences: Vec<(String, i64)> = after
            .into_iter()
            .map(|(limit, count)| (limit.clone(), count - before.get(&limit).copied().unwrap_or(0)))
            .filter(|(_, difference)| *difference != 0)
            .collect();
        if differences.is_empty() {
            continue;
        }
        for window in Window::ALL {
            let start = window.start(sent.at);
            let (namespace, entity) = (bucket.namespace.clone(), bucket.entity.clone());
            let resource = bucket.resource.clone();
            let key = UsageKey { namespace, entity, resource, window, start };
            let (consumed, events) = totals.entry(key).or_default();
            *events += 1;
            for (limit, difference) in &differences {
                *consumed.entry(limit.clone()).or_default() += difference;
            }
        }
    }
    for (consumed, _) in totals.values_mut() {
        consumed.retain(|_, sum| *sum != 0);
    }
    totals
}

fn counts_of(item: &Item) -> BTreeMap<String, i64> {
    let count = |(name, value): (&String, &Value)| {
        let limit = name.strip_prefix("b_")?.strip_suffix("_tc")?;
        (limit != "wcu").then(|| (limit.to_owned(), value.as_i64().unwrap()))
    };
    item.iter().filter_map(count).collect()
}

/// A store whose buckets are split and merged all the time.
#[derive(Debug)]
struct Resharding(DynamoStore);

impl Reshard for Resharding {
    fn reshard<'a>(
        &'a self,
        target: &'a Target,
        more: bool,
        now: Timestamp,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        match more {
            true => Box::pin(self.0.split(target.key(), now)),
            false => Box::pin(self.0.merge(target.key(), now)),
        }
    }
}

/// Runs many clients: on buckets of one shard with an even seed, on buckets that are split and merged all the time
/// with an odd one.
pub(crate) fn run_clients(simulation: Simulation, seed: u64) {
    match seed % 2 {
        0 => simulation.run(|table, _| {
            Arc::new(DynamoStore::new(table, DynamoOptions::default().shards_max(1)))
        }),
        _ => simulation.run_resharding(|table, client| {
            let options = DynamoOptions::default().seed(client.into()).shards_max(8);
            let store = DynamoStore::new(table, options.merge_after(Duration::from_secs(20)));
            (store.clone(), Resharding(store))
        }),
    };
}
