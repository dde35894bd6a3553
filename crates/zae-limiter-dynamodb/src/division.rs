//! What a process knows of the parts of a bucket, and which of them it asks.
//!
//! A process stays with one part as long as that has tokens: then all its callers go together in one
//! write, however many parts there are. When the part is short, the better of two others is next.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use zae_limiter_core::{BucketKey, Leg, Timestamp};
use zae_limiter_schema::SHARD_ZERO;

use crate::Shared;
use crate::lane::Lane;
use crate::parts::{Parts, held_for};
use crate::round::State;

/// For how long a process goes by what it knows of the count before it asks the first part again.
const COUNT_TRUSTED_MS: u64 = 60_000;

/// For how long a part counts as busy that was.
const BUSY_MS: u64 = 1_000;

/// What a process knows of the parts of a bucket.
#[derive(Debug)]
pub(crate) struct Division {
    /// How many there are.
    pub(crate) count: u32,
    /// When the first part said so.
    asked_at: Timestamp,
    /// When the count was last seen to change.
    pub(crate) changed_at: Option<Timestamp>,
    /// The part that takes are sent to.
    current: u32,
    /// A part that was too busy, and when.
    busy: Option<(u32, Timestamp)>,
    /// Whoever divides the bucket, or puts it together, holds this.
    pub(crate) gate: Arc<tokio::sync::Mutex<()>>,
    /// When its writes were last counted, and how many there were by then.
    pub(crate) counted: Option<(Timestamp, i64)>,
}

impl Division {
    fn new(now: Timestamp) -> Self {
        Self {
            count: 1,
            asked_at: now,
            changed_at: None,
            current: SHARD_ZERO,
            busy: None,
            gate: Arc::default(),
            counted: None,
        }
    }
}

impl Shared {
    /// Into how many parts a bucket is divided, as far as is known.
    pub(crate) fn count(&self, bucket: &BucketKey) -> u32 {
        let lane = self.lanes.find(bucket, SHARD_ZERO);
        lane.map_or(1, |lane| lane.lock().division.as_ref().map_or(1, |division| division.count))
    }

    /// Looks at, and changes, what is known of a bucket's division.
    pub(crate) fn division<T>(
        &self,
        bucket: &BucketKey,
        now: Timestamp,
        with: impl FnOnce(&mut Division) -> T,
    ) -> T {
        let lane = self.lanes.get(bucket, SHARD_ZERO);
        let mut inside = lane.lock();
        with(inside.division.get_or_insert_with(|| Box::new(Division::new(now))))
    }

    /// Takes note of how often a bucket is divided.
    pub(crate) fn set_count(&self, bucket: &BucketKey, count: u32, now: Timestamp) {
        if count == 1 && self.count(bucket) == 1 {
            return;
        }
        let drawn = self.draw(count);
        self.division(bucket, now, |division| {
            if division.count != count {
                division.count = count;
                division.changed_at = Some(now);
                // Else all processes would stay with the part that was too busy.
                division.current = drawn;
                division.busy = None;
            }
            division.asked_at = division.asked_at.max(now);
        });
    }

    /// Learns from a part that was seen. The first one knows the count; another may know of more.
    pub(crate) fn learn(&self, lane: &Lane, state: &State, now: Timestamp) {
        let (bucket, shard) = (&lane.key.bucket, lane.key.shard);
        match state {
            State::Item(item) if item.is_retired() => {
                let count = self.count(bucket).min(item.shard_count.next_power_of_two());
                self.set_count(bucket, count, now);
            }
            State::Item(item) if !item.is_expired(now) => {
                let count = item.shard_count.next_power_of_two();
                if shard == SHARD_ZERO || count > self.count(bucket) {
                    self.set_count(bucket, count, now);
                }
            }
            _ if shard == SHARD_ZERO => self.set_count(bucket, 1, now),
            _ => {}
        }
    }

    /// What is known of all parts, each no older than the trust in it; `None` where one is missing.
    pub(crate) fn known_parts(&self, bucket: &BucketKey, now: Timestamp) -> Option<Parts> {
        let count = self.count(bucket);
        let mut items = Vec::new();
        for shard in 0..count {
            let lane = self.lanes.find(bucket, shard)?;
            let inside = lane.lock();
            if inside.busy || !inside.waiting.is_empty() {
                return None;
            }
            match inside.fresh(now, self.options.local_refusal)? {
                State::Item(item) => items.push(item.clone()),
                State::Absent => return None,
            }
        }
        Some(Parts::live(items, now)).filter(Parts::is_complete)
    }

    /// The part that a take is sent to.
    pub(crate) fn choose(&self, leg: &Leg, now: Timestamp, avoid: &[u32]) -> u32 {
        let bucket = leg.target.key();
        let (count, current, asked_at) =
            self.division(bucket, now, |all| (all.count, all.current, all.asked_at));
        if now.millis_since(asked_at) >= COUNT_TRUSTED_MS && avoid.is_empty() {
            return SHARD_ZERO;
        }
        let may_stay = self.options.group_commit && current < count && !avoid.contains(&current);
        if may_stay && self.headroom(leg, current, now).is_none_or(|room| room >= 0) {
            return current;
        }
        let others: Vec<u32> = (0..count).filter(|shard| !avoid.contains(shard)).collect();
        let draw = || {
            let drawn = self.draw(u32::try_from(others.len()).unwrap_or(0));
            others.get(usize::try_from(drawn).unwrap_or(0)).copied()
        };
        let better = match (draw(), draw()) {
            (Some(one), Some(other)) => {
                let room = |shard| self.headroom(leg, shard, now).unwrap_or(0);
                if room(other) > room(one) { other } else { one }
            }
            _ => SHARD_ZERO,
        };
        self.division(bucket, now, |division| division.current = better);
        better
    }

    /// The part most likely to have what a leg asks, among those not tried; `None` when none is.
    pub(crate) fn next_best(&self, leg: &Leg, now: Timestamp, tried: &[u32]) -> Option<u32> {
        let count = self.count(leg.target.key());
        let others = (0..count).filter(|shard| !tried.contains(shard));
        let rooms = others.map(|shard| (self.headroom(leg, shard, now).unwrap_or(0), shard));
        rooms.filter(|(room, _)| *room >= 0).max_by_key(|(room, _)| *room).map(|(_, shard)| shard)
    }

    /// What a part has beyond what a leg asks of the scarcest limit, as far as it is known.
    fn headroom(&self, leg: &Leg, shard: u32, now: Timestamp) -> Option<i64> {
        let lane = self.lanes.find(leg.target.key(), shard)?;
        let inside = lane.lock();
        let Some((State::Item(item), _)) = &inside.known else { return None };
        let bucket = item.is_live(now).then(|| held_for(leg, item, now))?;
        let names = leg.target.limits().names();
        let rooms = leg.takes.iter().map(|take| {
            let held =
                bucket.cell(names[take.cell].as_str()).map_or(0, |(cell, _)| cell.tokens.get());
            held.saturating_sub(take.amount.get())
        });
        rooms.min()
    }

    /// A part is not there; whoever goes by memory is sent to another from now on.
    pub(crate) fn turn_to(&self, bucket: &BucketKey, gone: u32, next: u32, now: Timestamp) {
        self.division(bucket, now, |division| {
            if division.current == gone {
                division.current = next;
            }
        });
    }

    /// Takes note of a part that is too busy and turns to another one. True when the parts are busy
    /// all over, because another was, just now.
    pub(crate) fn is_busy_all_over(&self, bucket: &BucketKey, shard: u32, now: Timestamp) -> bool {
        let drawn = self.draw(self.count(bucket));
        self.division(bucket, now, |division| {
            // Without group commit calls go to all parts anyway.
            if division.count == 1 || !self.options.group_commit {
                return true;
            }
            if division.current == shard {
                division.current = drawn;
            }
            let busy = division.busy.filter(|(_, at)| now.millis_since(*at) < BUSY_MS);
            division.busy = busy.or(Some((shard, now)));
            busy.is_some_and(|(other, _)| other != shard)
        })
    }

    /// A number below `bound`, from the store's own seed.
    fn draw(&self, bound: u32) -> u32 {
        // SplitMix64: any spread will do.
        let drawn = self.drawn.fetch_add(1, Ordering::Relaxed).wrapping_add(self.options.seed);
        let mixed = drawn.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        let mixed = u32::try_from((mixed ^ (mixed >> 31)) >> 32).unwrap_or(0);
        if bound == 0 { 0 } else { mixed % bound }
    }

    /// What is known of the parts of a bucket, however long ago.
    pub(crate) fn remembered_parts(&self, bucket: &BucketKey, now: Timestamp) -> Parts {
        let known = (0..self.count(bucket)).filter_map(|shard| {
            let lane = self.lanes.find(bucket, shard)?;
            let inside = lane.lock();
            match &inside.known {
                Some((State::Item(item), _)) => Some(item.clone()),
                _ => None,
            }
        });
        Parts::live(known, now)
    }
}
