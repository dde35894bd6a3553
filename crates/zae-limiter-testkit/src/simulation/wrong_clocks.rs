//! Clocks that are wrong beyond every bound, on a table whose responses have a date.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use fastrand::Rng;
use zae_limiter_schema::{Action, Condition, ItemKey, Table, Update, Value, parse_key};

use super::scene::Scene;
use super::workload::{Stage, within};
use super::{ClientClock, VirtualTime};
use crate::table::SimTable;

/// Five minutes, an hour, a day, a year: how far clocks jump, in microseconds.
const JUMPS_US: [i64; 4] = [300_000_000, 3_600_000_000, 86_400_000_000, 31_536_000_000_000];

/// How far the time by a date is behind the true time at most: a date has whole seconds, and a response takes up to
/// one.
pub(super) const DATE_LAG_MS: i64 = 2_000;

impl Scene {
    /// Makes clocks jump beyond the bound of every store, which the table's dates then correct.
    pub(super) fn use_dates(&mut self, seed: u64) {
        let mut rng = Rng::with_seed(seed ^ 0x00C1_0C45);
        self.jump_us = JUMPS_US[rng.usize(..JUMPS_US.len())];
        self.is_dated = true;
    }

    /// How far the clocks are ahead for whom no date corrects them.
    pub(super) fn uncorrected_us(&self) -> u64 {
        let jump_us = if self.is_dated { 0 } else { self.jump_us };
        jump_us.unsigned_abs() + self.skew_us.unsigned_abs()
    }

    /// The table as a client sees it.
    pub(super) fn dated(&self, table: SimTable, time: &Arc<VirtualTime>) -> SimTable {
        match self.is_dated {
            true => table.dated_by(Arc::new(ClientClock::new(Arc::clone(time), 0, 0, 0))),
            false => table,
        }
    }
}

/// A client of an older release, or of the Python original, whose clock is ahead. Now and then it moves the refill
/// time of a shard. That grants nothing: the bucket was full for it.
pub(super) async fn freeze(stage: Arc<Stage>, table: SimTable) {
    for _ in 0..FREEZES_MAX {
        stage.pause().await;
        if stage.is_calm.load(Ordering::Relaxed) {
            return;
        }
        let shards: Vec<_> =
            table.items().into_iter().filter_map(|item| live_shard(&item)).collect();
        if shards.is_empty() {
            continue;
        }
        let (key, ttl) = shards[stage.draw(|rng| rng.usize(..shards.len()))].clone();
        let ahead = Duration::from_micros(stage.scene.jump_us.unsigned_abs());
        let now = stage.world.time.now().saturating_add(ahead);
        let mut actions = vec![Action::Set("rf".to_owned(), Value::number(now.as_millis()))];
        if let Some(ttl) = ttl {
            let later = ttl + i64::try_from(ahead.as_secs()).unwrap_or(0);
            actions.push(Action::Set("ttl".to_owned(), Value::number(later)));
        }
        let same_ttl = match ttl {
            Some(ttl) => Condition::Equal("ttl".to_owned(), Value::number(ttl)),
            None => Condition::Absent("ttl".to_owned()),
        };
        let conditions = vec![Condition::Exists("rf".to_owned()), same_ttl];
        // It may fail or hang, as everything does.
        let update = Update { key, actions, conditions };
        let _ = within(&stage, Some(Duration::from_secs(1)), table.update(&update)).await;
    }
}

/// How often a run freezes a shard.
const FREEZES_MAX: u32 = 12;

/// The key and the expiry of an item, if it is a shard that holds tokens.
fn live_shard(item: &zae_limiter_schema::Item) -> Option<(ItemKey, Option<i64>)> {
    let text = |name: &str| item.get(name).and_then(Value::as_str);
    let number = |name: &str| item.get(name).and_then(Value::as_i64);
    let key = ItemKey::new(text("PK")?, text("SK")?);
    parse_key(&key)?;
    number("rf")?;
    let shard: i64 = key.pk.rsplit('#').next()?.parse().ok()?;
    (shard < number("shard_count").unwrap_or(1)).then(|| (key, number("ttl")))
}
