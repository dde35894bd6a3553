//! A clock that the table's time corrects.

use std::sync::Arc;
use std::time::Duration;

use zae_limiter_core::{BoxFuture, Clock, MAX_CLOCK_SKEW, TimeCheck, Timestamp};
use zae_limiter_schema::Table;

/// The machine's clock, or the table's time if they differ by more than two minutes. A daemon with a wrong clock would
/// otherwise move refill times, and let its checkpoints expire.
#[derive(Debug)]
pub(crate) struct TableClock {
    table: Arc<dyn Table>,
    clock: Arc<dyn Clock>,
}

impl TableClock {
    pub(crate) fn shared(table: Arc<dyn Table>, clock: Arc<dyn Clock>) -> Arc<dyn Clock> {
        Arc::new(Self { table, clock })
    }
}

impl Clock for TableClock {
    fn now(&self) -> Timestamp {
        let now = self.clock.now();
        match self.table.time().check(now, MAX_CLOCK_SKEW) {
            TimeCheck::Beyond(time) => time,
            TimeCheck::Unknown | TimeCheck::Within => now,
        }
    }

    fn sleep(&self, wait: Duration) -> BoxFuture<'_, ()> {
        self.clock.sleep(wait)
    }

    fn stopwatch(&self) -> Duration {
        self.clock.stopwatch()
    }
}

#[cfg(test)]
mod tests {
    use zae_limiter_core::ManualClock;
    use zae_limiter_schema::Consistency;
    use zae_limiter_testkit::SimTable;

    use super::*;

    #[tokio::test]
    async fn a_wrong_clock_is_corrected_once_the_table_has_answered() {
        let at = Timestamp::from_millis;
        let right = Arc::new(ManualClock::new(at(1_000_000_000)));
        for error in [-300_000_000, 300_000_000] {
            let table = Arc::new(SimTable::default().dated_by(Arc::clone(&right) as _));
            let wrong = Arc::new(ManualClock::new(at(1_000_000_000 + error)));
            let clock = TableClock::shared(Arc::clone(&table) as _, Arc::clone(&wrong) as _);
            assert_eq!(clock.now(), wrong.now());
            table.read(&[], Consistency::Strong).await.unwrap();
            assert!(right.now().as_millis() - clock.now().as_millis() <= 2_000);
            wrong.set(at(1_000_000_000 + 100_000));
            assert_eq!(clock.now(), wrong.now(), "within the bound");
        }
    }
}
