//! The status of limits, as a table and as the JSON that scripts rely on.

use std::time::Duration;

use serde::Serialize;
use zae_limiter::LimitStatus;

use crate::columns::{Align, Cell, Columns};
use crate::printer::{Look, Printer};

/// One limit in a JSON document.
#[derive(Debug, Serialize)]
pub(crate) struct StatusJson {
    entity_id: String,
    resource: String,
    limit_name: String,
    capacity: i64,
    available: i64,
    requested: i64,
    exceeded: bool,
    retry_after_seconds: f64,
}

impl From<&LimitStatus> for StatusJson {
    fn from(status: &LimitStatus) -> Self {
        Self {
            entity_id: status.entity_id.to_string(),
            resource: status.resource.to_string(),
            limit_name: status.limit_name.to_string(),
            capacity: status.rate.capacity().whole_tokens(),
            available: status.available.whole_tokens(),
            requested: status.requested.whole_tokens(),
            exceeded: status.exceeded,
            retry_after_seconds: seconds(status.retry_after),
        }
    }
}

/// Seconds, rounded up to the millisecond.
pub(crate) fn seconds(duration: Duration) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "exact up to 285,000 years")]
    let millis = duration.as_nanos().div_ceil(1_000_000) as f64;
    millis / 1_000.0
}

/// A wait for people, rounded up: `350 ms`, `12.4 s`, `5 min 3 s`, `2 d 4 h`.
pub(crate) fn wait(duration: Duration) -> String {
    let millis = duration.as_nanos().div_ceil(1_000_000);
    let two = |large: u128, large_unit: &str, small: u128, small_unit: &str| match small {
        0 => format!("{large} {large_unit}"),
        small => format!("{large} {large_unit} {small} {small_unit}"),
    };
    if millis < 1_000 {
        return format!("{millis} ms");
    }
    let tenths = millis.div_ceil(100);
    if tenths < 600 {
        return format!("{}.{} s", tenths / 10, tenths % 10);
    }
    let seconds = millis.div_ceil(1_000);
    if seconds < 3_600 {
        return two(seconds / 60, "min", seconds % 60, "s");
    }
    let minutes = seconds.div_ceil(60);
    if minutes < 1_440 {
        return two(minutes / 60, "h", minutes % 60, "min");
    }
    let hours = minutes.div_ceil(60);
    two(hours / 24, "d", hours % 24, "h")
}

/// Prints the status of limits.
pub(crate) fn print_table(printer: &mut Printer, statuses: &[LimitStatus]) {
    use Align::{Left, Right};
    let mut table = Columns::new(&[
        ("ENTITY", Left),
        ("RESOURCE", Left),
        ("LIMIT", Left),
        ("AVAILABLE", Right),
        ("CAPACITY", Right),
        ("REQUESTED", Right),
        ("WAIT", Right),
    ]);
    let rows: Vec<Vec<Cell>> = statuses.iter().map(row).collect();
    table.print(printer, &rows);
}

fn row(status: &LimitStatus) -> Vec<Cell> {
    let look = if status.exceeded { Look::Bad } else { Look::Good };
    let wait = match status.retry_after {
        Duration::ZERO => "-".to_owned(),
        retry_after => wait(retry_after),
    };
    vec![
        Cell::from(&status.entity_id),
        Cell::from(&status.resource),
        Cell::from(&status.limit_name),
        Cell::new(look, status.available.whole_tokens()),
        Cell::from(status.rate.capacity().whole_tokens()),
        Cell::from(status.requested.whole_tokens()),
        Cell::new(if status.exceeded { Look::Bad } else { Look::Dim }, wait),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_are_rounded_up() {
        for (millis, text) in [
            (1, "1 ms"),
            (999, "999 ms"),
            (1_000, "1.0 s"),
            (1_001, "1.1 s"),
            (59_900, "59.9 s"),
            (59_901, "1 min"),
            (61_001, "1 min 2 s"),
            (3_600_000, "1 h"),
            (3_600_001, "1 h 1 min"),
            (86_400_000, "1 d"),
            (86_400_001, "1 d 1 h"),
        ] {
            assert_eq!(wait(Duration::from_millis(millis)), text);
        }
    }
}
