//! Derives the writes that follow from a batch of changes. Pure functions: `execute` writes.

use std::collections::BTreeMap;

use zae_limiter_core::{BucketKey, LimitName, Timestamp, UsageKey, UsageSettings};
use zae_limiter_schema::bucket::carry_shard_count;
use zae_limiter_schema::records::booking::{self, Booking, Mark, SOURCES_MAX, Source};
use zae_limiter_schema::{BucketItemKey, Item, SHARD_ZERO, Update, change};

use crate::change::BucketChange;
use crate::heat::writes_per_second;
use crate::refill::refill_of;
use crate::settings::Settings;

/// Writes per second from which on a bucket is split: 80 % of the 1,000 that a partition takes.
const HOT_WRITES: u64 = 800;

/// Changes to book to one usage record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsageEffect {
    /// The key of the record.
    pub key: UsageKey,
    /// The expiry of a new record.
    pub expires_at: Timestamp,
    /// Indexes of the changes in the batch, sorted by shard and position.
    pub changes: Vec<usize>,
}

impl UsageEffect {
    /// The booking that is missing from the record. `None` if the record has all of it. Without an
    /// `item` the record counts as empty. Changes up to the moment `not_before` do not count.
    pub fn booking(
        &self,
        batch: &[BucketChange],
        item: Option<&Item>,
        not_before: Option<Timestamp>,
    ) -> Option<Booking> {
        let not_before = not_before.max(item.and_then(booking::not_before));
        let mut marks: BTreeMap<u32, Option<Mark>> = BTreeMap::new();
        let mut consumed: BTreeMap<LimitName, i64> = BTreeMap::new();
        let mut sources: BTreeMap<u32, Source> = BTreeMap::new();
        let (mut events, mut earliest) = (0, Timestamp::from_millis(i64::MAX));
        for change in self.changes.iter().map(|at| &batch[*at]) {
            if not_before.is_some_and(|last| change.at <= last) {
                continue;
            }
            let (shard, position) = (change.key.shard, &change.position);
            let mark = marks.entry(shard).or_insert_with(|| Mark::of(item?, shard));
            if mark.as_ref().is_some_and(|mark| mark.is_behind(position)) {
                continue;
            }
            for (limit, amount) in &change.consumed {
                let sum = consumed.entry(limit.clone()).or_default();
                *sum = sum.saturating_add(*amount);
            }
            let first = || Source { first: position.clone(), last: position.clone() };
            sources.entry(shard).or_insert_with(first).last = position.clone();
            events += 1;
            earliest = earliest.min(change.at);
        }
        let (key, expires_at) = (self.key.clone(), self.expires_at);
        (events > 0).then_some(Booking { key, consumed, events, expires_at, sources, earliest })
    }
}

/// A bucket to be split into twice as many shards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingSplit {
    /// The key of the bucket.
    pub bucket: BucketKey,
    /// How many shards it has now.
    pub from: u32,
}

/// Announces a bucket's new shard count to one of its shards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Announcement {
    /// The write to the shard.
    pub update: Update,
    /// The index in the batch of the change that has split the bucket.
    pub change: usize,
}

/// The writes that follow from a batch of changes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Effects {
    /// One for each usage record.
    pub usage: Vec<UsageEffect>,
    /// Refills of buckets that run short.
    pub refills: Vec<Update>,
    /// Splits of buckets that are written too often.
    pub splits: Vec<PendingSplit>,
    /// Announcements to the shards of buckets that were split.
    pub announcements: Vec<Announcement>,
}

/// Derives the writes from a batch, which must be in the order of the stream.
pub fn effects_of(batch: &[BucketChange], settings: &Settings, now: Timestamp) -> Effects {
    let mut shards: BTreeMap<&BucketItemKey, Vec<usize>> = BTreeMap::new();
    for (at, change) in batch.iter().enumerate() {
        shards.entry(&change.key).or_default().push(at);
    }
    let mut effects = Effects { usage: usage_of(batch, &settings.usage), ..Effects::default() };
    for (key, mut places) in shards {
        // The batch may contain a record twice.
        places.sort_by(|a, b| batch[*a].position.cmp(&batch[*b].position));
        places.dedup_by(|a, b| batch[*a].position == batch[*b].position);
        let changes: Vec<&BucketChange> = places.iter().map(|at| &batch[*at]).collect();
        if settings.refill {
            effects.refills.extend(refill(key, &changes, now));
        }
        if key.shard == SHARD_ZERO {
            effects.splits.extend(pending(key, &changes));
            for at in places {
                effects.announcements.extend(announcements(key, &batch[at], at));
            }
        }
    }
    effects
}

fn usage_of(batch: &[BucketChange], settings: &UsageSettings) -> Vec<UsageEffect> {
    let mut records: BTreeMap<UsageKey, Vec<usize>> = BTreeMap::new();
    for (at, change) in batch.iter().enumerate() {
        if change.consumed.is_empty() {
            continue;
        }
        for window in &settings.windows {
            let BucketKey { namespace, entity, resource } = change.key.bucket.clone();
            let start = window.start(change.at);
            let key = UsageKey { namespace, entity, resource, window: *window, start };
            records.entry(key).or_default().push(at);
        }
    }
    let mut effects = Vec::with_capacity(records.len());
    for (key, mut changes) in records {
        let order = |at: &usize| (batch[*at].key.shard, &batch[*at].position);
        changes.sort_by(|a, b| order(a).cmp(&order(b)));
        changes.dedup_by(|a, b| order(a) == order(b));
        let expires_at = key.window.end(key.start).saturating_add(settings.retention);
        for changes in by_sources(batch, changes) {
            effects.push(UsageEffect { key: key.clone(), expires_at, changes });
        }
    }
    effects
}

/// Divides changes into pieces, each with no more shards than one booking can hold.
fn by_sources(batch: &[BucketChange], changes: Vec<usize>) -> Vec<Vec<usize>> {
    let mut pieces: Vec<Vec<usize>> = Vec::new();
    let (mut shards, mut last) = (0, None);
    for at in changes {
        let shard = batch[at].key.shard;
        if last != Some(shard) {
            (shards, last) = (shards + 1, Some(shard));
        }
        let piece = (shards - 1) / SOURCES_MAX;
        pieces.resize(pieces.len().max(piece + 1), Vec::new());
        pieces[piece].push(at);
    }
    pieces
}

fn refill(key: &BucketItemKey, changes: &[&BucketChange], now: Timestamp) -> Option<Update> {
    let mut consumed: BTreeMap<&LimitName, i64> = BTreeMap::new();
    for (limit, amount) in changes.iter().flat_map(|change| &change.consumed) {
        let sum = consumed.entry(limit).or_default();
        *sum = sum.saturating_add(*amount);
    }
    refill_of(key, &changes.last()?.item, &consumed, now)
}

fn pending(key: &BucketItemKey, changes: &[&BucketChange]) -> Option<PendingSplit> {
    // Writes before the last split do not count: they went to fewer shards.
    let split = changes.iter().rposition(|change| change.is_split);
    let changes = &changes[split.map_or(0, |at| at + 1)..];
    let is_hot = writes_per_second(changes) >= HOT_WRITES;
    let from = change::shard_count(&changes.last()?.item);
    is_hot.then(|| PendingSplit { bucket: key.bucket.clone(), from })
}

/// Announcements to all other shards, whether they exist or not.
fn announcements(
    first: &BucketItemKey,
    change: &BucketChange,
    at: usize,
) -> impl Iterator<Item = Announcement> {
    let count = change::shard_count(&change.item);
    let others = SHARD_ZERO + 1..if change.must_announce { count } else { 0 };
    others.map(move |shard| {
        let key = BucketItemKey { bucket: first.bucket.clone(), shard };
        Announcement { update: carry_shard_count(&key, count), change: at }
    })
}
