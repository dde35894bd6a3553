//! Helpers that the tests share.
#![allow(dead_code, unreachable_pub, reason = "not every test uses everything")]
#![allow(clippy::unwrap_used, reason = "only tests are here")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tempfile::TempDir;
use zae_limiter_core::{
    Admission, Bucket, BucketKey, EntityId, Leg, Lifetime, Limit, LimitSet, NamespaceId, Placement,
    Plan, ResourceName, Settlement, Store, Take, Takes, Target, Timestamp, amount,
};

/// 2026-11-15T14:25:36.789Z
pub const NOW: Timestamp = Timestamp::from_millis(1_794_752_736_789);

pub fn at(seconds: u64) -> Timestamp {
    NOW.saturating_add(Duration::from_secs(seconds))
}

pub fn ns() -> NamespaceId {
    NamespaceId::new("AbCdEfGhIj_").unwrap()
}

pub fn entity(id: &str) -> EntityId {
    EntityId::new(id).unwrap()
}

pub fn resource(name: &str) -> ResourceName {
    ResourceName::new(name).unwrap()
}

pub fn bucket_key(id: &str, on: &str) -> BucketKey {
    BucketKey { namespace: ns(), entity: entity(id), resource: resource(on) }
}

pub fn limits(limits: impl IntoIterator<Item = Limit>) -> Arc<LimitSet> {
    Arc::new(LimitSet::new(limits).unwrap())
}

/// A bucket of `capacity` tokens that refill within an hour.
pub fn target(id: &str, capacity: u64) -> Arc<Target> {
    let limits = limits([Limit::per_hour("rpm", capacity)]);
    Arc::new(Target::new(bucket_key(id, "gpt-4"), limits, Lifetime::Forever))
}

pub fn takes(tokens: &[u64]) -> Takes {
    let amounts = tokens.iter().map(|tokens| amount(*tokens).unwrap());
    amounts.enumerate().map(|(cell, amount)| Take { cell, amount }).collect()
}

pub fn plan_at(now: Timestamp, legs: &[(&Arc<Target>, u64)]) -> Plan {
    let leg = |(target, tokens): &(&Arc<Target>, u64)| Leg {
        target: Arc::clone(target),
        takes: takes(&[*tokens]),
    };
    Plan { max_skew: None, now, legs: legs.iter().map(leg).collect() }
}

pub fn plan(target: &Arc<Target>, tokens: u64) -> Plan {
    plan_at(NOW, &[(target, tokens)])
}

pub fn refund(target: &Arc<Target>, tokens: u64) -> Settlement {
    let negate = |take: Take| Take { cell: take.cell, amount: -take.amount };
    let differences = takes(&[tokens]).into_iter().map(negate).collect();
    Settlement { target: Arc::clone(target), placement: Placement::default(), differences }
}

pub fn charge(target: &Arc<Target>, tokens: u64) -> Settlement {
    Settlement {
        target: Arc::clone(target),
        placement: Placement::default(),
        differences: takes(&[tokens]),
    }
}

/// Whether the plan was admitted.
pub async fn take(store: &impl Store, plan: &Plan) -> bool {
    matches!(store.acquire(plan).await.unwrap(), Admission::Taken(_))
}

pub async fn peek(store: &impl Store, target: &Target, now: Timestamp) -> Option<Bucket> {
    let keys = [target.key().clone()];
    store.peek(&keys, now).await.unwrap().pop().unwrap()
}

/// Whole tokens of the first limit as of its last refill.
pub async fn tokens(store: &impl Store, target: &Target, now: Timestamp) -> Option<i64> {
    Some(peek(store, target, now).await?.cells()[0].tokens.whole_tokens())
}

/// A temporary folder, deleted at the end of the test.
pub struct Folder(TempDir);

impl Folder {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    pub fn file(&self) -> PathBuf {
        self.0.path().join("limits.db")
    }
}

pub fn is_sound(file: &Path) -> bool {
    let conn = rusqlite::Connection::open(file).unwrap();
    let result: String = conn.query_row("PRAGMA integrity_check", [], |row| row.get(0)).unwrap();
    result == "ok"
}
