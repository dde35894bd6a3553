//! Checks after a run with limiters.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use zae_limiter_core::{Error, Limit, LimitSet};
use zae_limiter_schema::{Item, Value, bucket_partition};

use super::super::audit::Excuse;
use super::super::reading::Reading;
use super::super::workload::locked;
use super::{Client, Place, RESOURCE, Stage};

/// The most shards of a bucket.
const SHARDS_MAX: u32 = 64;

/// The items of an entity's bucket, with their shards.
fn items_of(stage: &Stage, admin: &Client, entity: &str) -> Vec<(u32, Item)> {
    let bucket = stage.bucket(&admin.limiter, entity);
    let partitions: BTreeMap<String, u32> =
        (0..SHARDS_MAX).map(|shard| (bucket_partition(&bucket, shard), shard)).collect();
    let shard = |item: &Item| {
        let pk = item.get("PK").and_then(Value::as_str)?;
        partitions.get(pk).copied()
    };
    let items = stage.world.table.items().into_iter();
    items.filter_map(|item| Some((shard(&item)?, item))).collect()
}

/// The buckets contain what commits have confirmed, and nothing else if all outcomes are known.
pub(super) fn check_kept(stage: &Stage, admin: &Client) {
    let of = |map: &BTreeMap<(String, String), i64>, entity: &str, limit: &str| {
        map.get(&(entity.to_owned(), limit.to_owned())).copied().unwrap_or(0)
    };
    let (committed, dropped) = (locked(&stage.kept).clone(), locked(&stage.used).clone());
    // The writes of a drop are not confirmed.
    let kept = |entity: &str, limit: &str, is_sure: bool| {
        let used = if is_sure { of(&dropped, entity, limit) } else { 0 };
        of(&committed, entity, limit) + used
    };
    for (at, place) in stage.entities.iter().enumerate() {
        let items = items_of(stage, admin, &place.id);
        let base = bucket_partition(&stage.bucket(&admin.limiter, &place.id), 0);
        let is_unsure =
            locked(&stage.unsure).contains(&place.id) || stage.world.auditor.is_unsure(&base);
        for limit in lasting(place) {
            let count = |item: &Item| {
                item.get(&format!("b_{limit}_tc")).and_then(Value::as_i64).unwrap_or(0)
            };
            let consumed: i64 = items.iter().map(|(_, item)| count(item)).sum();
            let least = kept(&place.id, &limit, !is_unsure);
            // Takes of descendants count here too, for limits that both have.
            let below = stage.entities.iter().enumerate();
            let below = below.filter(|(one, _)| *one != at && stage.is_below(*one, at));
            let most = least + below.map(|(_, place)| kept(&place.id, &limit, true)).sum::<i64>();
            let is_wrong = consumed < least * 1_000 || (!is_unsure && consumed > most * 1_000);
            if is_wrong {
                stage.report_violation(format!(
                    "{} {limit}: commits have confirmed {least} tokens, {most} with descendants; \
                     the bucket has counted {consumed} millitokens",
                    place.id
                ));
            }
            let mut report = locked(&stage.report);
            *if is_unsure { &mut report.unsure } else { &mut report.exact } += 1;
        }
    }
}

/// Limits that an entity has in all versions. Other limits lose their counts when they are removed.
fn lasting(place: &Place) -> BTreeSet<String> {
    let names = |limits: &Vec<Limit>| -> BTreeSet<String> {
        limits.iter().map(|limit| limit.name.clone()).collect()
    };
    let versions = place.versions.iter().map(names);
    versions.reduce(|all, one| &all & &one).unwrap_or_default()
}

impl Stage {
    /// Whether an entity is a descendant of another.
    fn is_below(&self, entity: usize, above: usize) -> bool {
        let parent = |at: &usize| self.entities[*at].parent;
        std::iter::successors(Some(entity), parent).skip(1).any(|at| at == above)
    }
}

/// All limiters use the stored limits, and so does every shard that they write to.
pub(super) async fn check_limits(stage: &Stage, clients: &[Arc<Client>]) {
    let Some(admin) = clients.last() else { return };
    let mut stored: Vec<Vec<Limit>> = Vec::new();
    for place in &stage.entities {
        match admin.limiter.limits(&place.id, Some(RESOURCE)).await {
            Ok(Some(config)) => stored.push(config.limits.to_limits()),
            other => {
                let what = format!("{}: no limits without faults: {other:?}", place.id);
                return stage.report_violation(what);
            }
        }
    }
    for client in clients {
        for (place, limits) in stage.entities.iter().zip(&stored) {
            match client.limiter.effective_limits(&place.id, RESOURCE).await {
                Ok(effective) if effective.limits == *limits => {}
                other => {
                    let id = client.id;
                    let what = format!("client {id}: {}: not {limits:?}: {other:?}", place.id);
                    return stage.report_violation(what);
                }
            }
        }
    }
    let items = |stage: &Stage| -> Vec<Vec<(u32, Item)>> {
        stage.entities.iter().map(|place| items_of(stage, admin, &place.id)).collect()
    };
    let before = items(stage);
    for client in clients {
        let at = stage.draw(|rng| rng.usize(..stage.entities.len()));
        check_service(stage, client, &stage.entities[at], &stored[at]).await;
    }
    for (place, limits) in stage.entities.iter().zip(&stored) {
        check_service(stage, admin, place, limits).await;
    }
    let mut written = 0;
    for (((place, limits), before), after) in
        stage.entities.iter().zip(&stored).zip(before).zip(items(stage))
    {
        let limits = LimitSet::new(limits.clone()).expect("limits that were stored");
        for (shard, item) in after.iter().filter(|one| !before.contains(one)) {
            let Some(reading) = Reading::of(*shard, item).filter(Reading::holds_share) else {
                continue;
            };
            // A split or merge also writes to a shard, and does not change its limits.
            let old = before.iter().find(|(at, _)| at == shard);
            let old = old.and_then(|(_, item)| Reading::of(*shard, item));
            let consumed = |reading: &Reading| -> Vec<(String, i64)> {
                reading.cells.iter().map(|(name, cell)| (name.clone(), cell.consumed)).collect()
            };
            let is_taken_from = match &old {
                Some(old) => consumed(old) != consumed(&reading),
                None => consumed(&reading).iter().any(|(_, consumed)| *consumed != 0),
            };
            written += 1;
            if !is_taken_from {
                continue;
            }
            if !goes_by(&reading, &limits) {
                stage.report_violation(format!("{}: not under {limits:?}: {reading:#?}", place.id));
            }
        }
    }
    if written < stage.entities.len() {
        stage.report_violation(format!("only {written} shards were written without faults"));
    }
}

/// A limiter serves again: it admits a call, at the latest after the retry-after of a refusal.
async fn check_service(stage: &Stage, client: &Client, place: &Place, limits: &[Limit]) {
    // An open breaker notices with the next calls that the store is available.
    for _ in 0..3 {
        let _ = client.limiter.acquire(&place.id, RESOURCE).take(&limits[0].name, 0).await;
        stage.world.time.sleep(Duration::from_secs(5)).await;
    }
    let limit = &limits[0].name;
    let mut waits = Vec::new();
    for turn in 0..40 {
        if turn == 20 {
            if !is_outdated(stage, client, place, limits) {
                break;
            }
            // A change of limits failed before it reached the bucket. The bucket refills by its old
            // limits, so the waits of refused calls are wrong until the limits are set again.
            stage.world.auditor.excuse(Excuse::LivenessOutdated);
            let set = client.limiter.set_limits(&place.id, Some(RESOURCE), limits.to_vec()).await;
            if let Err(error) = set {
                return stage
                    .report_violation(format!("{}: no limits without faults: {error}", place.id));
            }
        }
        match client.limiter.acquire(&place.id, RESOURCE).take(limit, 1).await {
            Ok(lease) if !lease.is_degraded() => {
                let _ = lease.commit().await;
                return;
            }
            Err(Error::Exceeded(refusal)) => {
                waits.push(refusal.retry_after());
                stage.world.time.sleep(refusal.retry_after()).await;
            }
            other => {
                let other = other.map(|_| "a degraded lease");
                return stage.report_violation(format!("no service without faults: {other:?}"));
            }
        }
    }
    stage.report_violation(format!(
        "{} {limit}: refused again and again without faults: {waits:?}",
        place.id
    ));
}

/// Whether a shard of an entity's bucket does not have the stored limits yet.
fn is_outdated(stage: &Stage, client: &Client, place: &Place, limits: &[Limit]) -> bool {
    let limits = LimitSet::new(limits.to_vec()).expect("limits that were stored");
    let items = items_of(stage, client, &place.id);
    let readings = items.iter().filter_map(|(shard, item)| Reading::of(*shard, item));
    let mut shards = readings.filter(Reading::holds_share);
    shards.any(|reading| !goes_by(&reading, &limits))
}

/// Whether a shard has all of these limits.
fn goes_by(reading: &Reading, limits: &LimitSet) -> bool {
    let has = |limit: &str, rate| reading.cells.get(limit).is_some_and(|cell| cell.whole == rate);
    limits.iter().all(|(name, rate)| has(name.as_str(), *rate))
}
