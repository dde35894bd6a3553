//! The sweeper: deletes expired buckets, usage records and audit events, a few rows at a time.
//!
//! An index on the expiry would change with every acquire. Instead the sweeper walks through the
//! tables in the order of their keys, and starts over at the end.
//!
//! A clock that is ahead must not delete what has not expired. So the sweeper does not decide by the time of the last
//! call, but by a moment that the file has seen and that the clock has since left behind by an hour or a day.

use rusqlite::types::Value;
use rusqlite::{Connection, OptionalExtension as _, Row, params, params_from_iter};
use zae_limiter_core::{BucketKey, Key, Timestamp, UsageKey};

use crate::error::Failure;
use crate::ledger::{Ledger, bucket_key};
use crate::records;

/// The most rows that one step reads.
pub(crate) const SWEEP_MAX: usize = 100;

/// One hour: how long after its expiry a bucket stays at least.
pub(crate) const BUCKET_DELAY_MS: i64 = 3_600_000;

/// One day: the same for usage records and audit events, which nobody can restore.
pub(crate) const RECORD_DELAY_MS: i64 = 86_400_000;

/// A walk through one table in the order of its key.
struct Walk {
    sql: &'static str,
    /// How many columns the key has. They come first, then the expiry.
    columns: usize,
    /// How long the clock must have kept its time before rows are deleted by it.
    delay_ms: i64,
    key: fn(&Row<'_>) -> Result<Key, Failure>,
}

const WALKS: [Walk; 3] = [
    Walk {
        sql: "SELECT ns, entity, resource, expires_at FROM bucket \
              WHERE (ns, entity, resource) > (?1, ?2, ?3) ORDER BY ns, entity, resource LIMIT ?4",
        columns: 3,
        delay_ms: BUCKET_DELAY_MS,
        key: |row| Ok(Key::Bucket(bucket_key(row)?)),
    },
    Walk {
        sql: "SELECT ns, entity, window, resource, start, expires_at FROM usage \
              WHERE (ns, entity, window, resource, start) > (?1, ?2, ?3, ?4, ?5) \
              ORDER BY ns, entity, window, resource, start LIMIT ?6",
        columns: 5,
        delay_ms: RECORD_DELAY_MS,
        key: |row| {
            Ok(Key::Usage(UsageKey {
                namespace: records::name(row, 0)?,
                entity: records::name(row, 1)?,
                window: records::window(row, 2)?,
                resource: records::name(row, 3)?,
                start: records::time(row, 4)?,
            }))
        },
    },
    Walk {
        sql: "SELECT ns, subject, id, expires_at FROM audit \
              WHERE (ns, subject, id) > (?1, ?2, ?3) ORDER BY ns, subject, id LIMIT ?4",
        columns: 3,
        delay_ms: RECORD_DELAY_MS,
        key: |row| Ok(Key::Audit(records::name(row, 0)?, records::name(row, 1)?, row.get(2)?)),
    },
];

/// A row of the table `sweep`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Horizon {
    /// A moment that the clock has shown.
    seen: i64,
    /// Rows that expired before this moment are deleted. `None` until the clock has kept its time once.
    until: Option<i64>,
}

impl Horizon {
    /// The horizon after a call at `now`. A moment becomes the horizon when the clock shows a later one by the delay.
    /// A clock that was set back starts again.
    fn after(before: Option<Self>, now: i64, delay_ms: i64) -> Self {
        let Some(before) = before else { return Self { seen: now, until: None } };
        if now < before.seen {
            return Self { seen: now, until: before.until.map(|until| until.min(now)) };
        }
        match now.saturating_sub(before.seen) >= delay_ms {
            true => Self { seen: now, until: Some(before.seen) },
            false => before,
        }
    }

    /// Reads the horizon of a delay, moves it, and writes it if it has changed.
    fn advance(conn: &Connection, now: i64, delay_ms: i64) -> Result<Self, Failure> {
        let read = "SELECT seen, until FROM sweep WHERE delay = ?1";
        let before = conn
            .prepare_cached(read)?
            .query_row([delay_ms], |row| Ok(Self { seen: row.get(0)?, until: row.get(1)? }))
            .optional()?;
        let after = Self::after(before, now, delay_ms);
        if before != Some(after) {
            let write = "INSERT OR REPLACE INTO sweep (delay, seen, until) VALUES (?1, ?2, ?3)";
            conn.prepare_cached(write)?.execute(params![delay_ms, after.seen, after.until])?;
        }
        Ok(after)
    }
}

/// The sweeper's position: the table, and the last key that it has read there.
#[derive(Debug, Default)]
pub(crate) struct Sweeper {
    walk: usize,
    after: Option<Vec<Value>>,
}

impl Sweeper {
    /// Does one step, within a transaction.
    pub(crate) fn step(&mut self, ledger: &mut Ledger, now: Timestamp) -> Result<(), Failure> {
        let walk = &WALKS[self.walk];
        let horizon = Horizon::advance(&ledger.conn, now.as_millis(), walk.delay_ms)?;
        let limit = horizon.until.unwrap_or(i64::MIN);
        let start = || vec![Value::Text(String::new()); walk.columns];
        let mut values = self.after.take().unwrap_or_else(start);
        values.push(Value::Integer(SWEEP_MAX as i64));
        let mut expired = Vec::new();
        let mut seen = 0;
        {
            let mut statement = ledger.conn.prepare_cached(walk.sql)?;
            let mut rows = statement.query(params_from_iter(values))?;
            while let Some(row) = rows.next()? {
                seen += 1;
                if seen == SWEEP_MAX {
                    let columns = (0..walk.columns).map(|at| row.get(at));
                    self.after = Some(columns.collect::<Result<_, _>>()?);
                }
                let expiry: Option<i64> = row.get(walk.columns)?;
                // The sweeper skips damaged rows: the next call that reads one reports it.
                if expiry.is_some_and(|expiry| expiry <= limit)
                    && let Ok(key) = (walk.key)(row)
                {
                    expired.push(key);
                }
            }
        }
        if seen < SWEEP_MAX {
            self.walk = (self.walk + 1) % WALKS.len();
        }
        for key in &expired {
            if let Key::Bucket(key) = key {
                book_usage(ledger, key)?;
            }
        }
        ledger.delete(&expired)
    }
}

/// Books a bucket's usage before the bucket is deleted.
fn book_usage(ledger: &mut Ledger, key: &BucketKey) -> Result<(), Failure> {
    let Ok(at) = ledger.states.find(&ledger.conn, key, None) else { return ledger.check() };
    let booking = ledger.states.get(at).cloned().and_then(|mut state| state.take_booking());
    booking.map_or(Ok(()), |booking| ledger.book(key, &booking))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: i64 = BUCKET_DELAY_MS;

    /// The horizon after calls at these moments.
    fn until(moments: &[i64]) -> Option<i64> {
        let step = |before, now: &i64| Some(Horizon::after(before, *now, HOUR));
        moments.iter().fold(None, step)?.until
    }

    #[test]
    fn a_moment_counts_when_the_clock_has_kept_its_time_for_an_hour() {
        assert_eq!(until(&[0]), None);
        assert_eq!(until(&[0, HOUR - 1]), None);
        assert_eq!(until(&[0, HOUR]), Some(0));
        assert_eq!(until(&[0, HOUR - 1, HOUR, 2 * HOUR - 1]), Some(0));
        assert_eq!(until(&[0, HOUR, 2 * HOUR]), Some(HOUR));
    }

    #[test]
    fn a_clock_that_is_ahead_for_less_than_an_hour_moves_nothing() {
        let day = 24 * HOUR;
        let ahead = 100 * day;
        assert_eq!(until(&[0, ahead]), Some(0));
        assert_eq!(until(&[0, ahead, ahead + HOUR - 1]), Some(0));
        // It was set right, and a day later it is wrong again.
        assert_eq!(until(&[0, ahead, HOUR / 2, day, ahead]), Some(day));
        // Later nothing tells the wrong clock from a right one.
        assert_eq!(until(&[0, ahead, ahead + HOUR]), Some(ahead));
        assert_eq!(until(&[0, ahead, ahead + HOUR, day]), Some(day));
    }

    #[test]
    fn a_file_that_was_idle_catches_up() {
        let year = 365 * 24 * HOUR;
        assert_eq!(until(&[0, year, year + HOUR]), Some(year));
    }
}
