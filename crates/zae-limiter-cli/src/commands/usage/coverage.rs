//! Whether the store has recorded all usage of the requested window.
//!
//! The aggregator of a DynamoDB table records the windows of its own settings, and a table may have had several
//! aggregators. The table does not say which windows these were, but the records of the other windows do.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;
use zae_limiter::model::{Usage, UsageQuery};
use zae_limiter::store::UsageRecording;
use zae_limiter::testing::Clock;
use zae_limiter::{Error, RateLimiter, Timestamp, Window};

use crate::exit::ExitStatus;
use crate::failure::Failure;
use crate::printer::{Printer, to_json};

/// The most records of shorter windows that are added up. A month of one entity and resource has 31 days.
const RECORDS_MAX: usize = 20_000;

/// The aggregator writes the records of one change one after the other. Within this time it has written all of them.
const BOOKED_WITHIN: Duration = Duration::from_secs(2);

/// A month whose record lacks events.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct Gap {
    month: String,
    recorded_events: u64,
    /// The events that shorter windows of the month contain.
    known_events: u64,
}

/// Checks that usage of this window is recorded, and returns the months that are recorded in part.
///
/// # Errors
///
/// When the store has records of other windows only.
pub(super) async fn check(
    limiter: &RateLimiter,
    query: &UsageQuery<'_>,
    window: Window,
    pace: &dyn Clock,
) -> Result<Vec<Gap>, Failure> {
    if limiter.store().usage_recording() == UsageRecording::Immediate {
        return Ok(Vec::new());
    }
    if window != Window::Monthly {
        if first_page(query, window).await?.is_empty() {
            fail_if_others(query, window, pace).await?;
        }
        return Ok(Vec::new());
    }
    // The shorter windows first: what is booked meanwhile then appears in the months, too.
    let mut known = BTreeMap::new();
    for shorter in [Window::Daily, Window::Hourly] {
        let events = events_by_month(query, shorter).await?;
        for (month, events) in events {
            let sum = known.entry(month).or_insert(0);
            *sum = events.max(*sum);
        }
    }
    let mut recorded = events_by_month(query, Window::Monthly).await?;
    if recorded.is_empty() && !known.is_empty() {
        fail_if_others(query, window, pace).await?;
        recorded = events_by_month(query, Window::Monthly).await?;
    }
    Ok(gaps(&recorded, &known))
}

/// The months of which shorter windows contain more events.
fn gaps(recorded: &BTreeMap<Timestamp, u64>, known: &BTreeMap<Timestamp, u64>) -> Vec<Gap> {
    let gap = |(month, known): (&Timestamp, &u64)| {
        let recorded_events = recorded.get(month).copied().unwrap_or(0);
        let month = Window::Monthly.label(*month);
        (recorded_events < *known).then_some(Gap { month, recorded_events, known_events: *known })
    };
    known.iter().filter_map(gap).collect()
}

/// Warns about incomplete months.
pub(super) fn warn(printer: &mut Printer, gaps: &[Gap]) {
    match warning(gaps) {
        None => {}
        Some(_) if printer.is_json() => {
            let document = to_json(&serde_json::json!({ "incomplete": gaps }));
            printer.write_err(&format!("{document}\n"));
        }
        Some(warning) => printer.warn(warning),
    }
}

fn warning(gaps: &[Gap]) -> Option<String> {
    let part = |gap: &Gap| {
        let Gap { month, recorded_events, known_events } = gap;
        format!("{month} has {recorded_events} of {known_events} events")
    };
    let parts: Vec<String> = gaps.iter().map(part).collect();
    (!gaps.is_empty()).then(|| {
        format!(
            "months are recorded in part only: {}; shorter windows are complete: -w daily, -w hourly",
            parts.join(", ")
        )
    })
}

async fn events_by_month(
    query: &UsageQuery<'_>,
    window: Window,
) -> Result<BTreeMap<Timestamp, u64>, Error> {
    let (mut events, mut read) = (BTreeMap::new(), 0);
    let mut pages = query.clone().window(window).pages()?;
    while let Some(page) = pages.next_page().await? {
        read += page.len();
        for usage in page {
            *events.entry(Window::Monthly.start(usage.key.start)).or_insert(0) += usage.events;
        }
        // Fewer events than there are find fewer gaps, and invent none.
        if window != Window::Monthly && read >= RECORDS_MAX {
            break;
        }
    }
    Ok(events)
}

async fn first_page(query: &UsageQuery<'_>, window: Window) -> Result<Vec<Usage>, Error> {
    let mut pages = query.clone().window(window).pages()?;
    Ok(pages.next_page().await?.unwrap_or_default())
}

/// Fails if there are records of other windows only.
async fn fail_if_others(
    query: &UsageQuery<'_>,
    window: Window,
    pace: &dyn Clock,
) -> Result<(), Failure> {
    let mut others = Vec::new();
    for other in Window::ALL.into_iter().filter(|other| *other != window) {
        if !first_page(query, other).await?.is_empty() {
            others.push(other);
        }
    }
    if others.is_empty() {
        return Ok(());
    }
    // They may have been written just now.
    pace.sleep(BOOKED_WITHIN).await;
    match first_page(query, window).await?.is_empty() {
        true => Err(not_recorded(window, &others)),
        false => Ok(()),
    }
}

fn not_recorded(window: Window, others: &[Window]) -> Failure {
    let windows = match window {
        Window::Hourly => "hours",
        Window::Daily => "days",
        Window::Monthly => "months",
    };
    let others: Vec<&str> = others.iter().map(|other| other.as_str()).collect();
    let message = format!(
        "this table records {} usage only; {windows} are not recorded",
        others.join(" and ")
    );
    let last = others.last().copied().unwrap_or_default();
    Failure::new(ExitStatus::NotFound, message).hint(format!(
        "use -w {last}; to record {windows} from now on, deploy the stack with --snapshot-windows, or \
         run aggregate with --windows"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn months(events: &[(&str, u64)]) -> BTreeMap<Timestamp, u64> {
        let start = |label: &str| Window::Monthly.start_of(label).expect("a month");
        events.iter().map(|(label, events)| (start(label), *events)).collect()
    }

    #[test]
    fn a_month_with_fewer_events_than_its_days_is_a_gap() {
        let known = months(&[("2026-09", 5), ("2026-10", 40), ("2026-11", 9)]);
        // Days expire before their month does.
        let recorded = months(&[("2026-08", 7), ("2026-09", 6), ("2026-10", 12), ("2026-11", 9)]);
        let found = gaps(&recorded, &known);
        let gap = Gap { month: "2026-10".to_owned(), recorded_events: 12, known_events: 40 };
        assert_eq!(found, [gap]);
        let text = warning(&found).expect("a gap");
        assert!(text.contains("2026-10 has 12 of 40 events;"), "{text}");
        assert_eq!(warning(&gaps(&known, &known)), None);
        assert_eq!(gaps(&BTreeMap::new(), &known).len(), 3);
    }

    #[test]
    fn what_is_not_recorded_is_said_with_what_is() {
        let failure = not_recorded(Window::Monthly, &[Window::Hourly, Window::Daily]);
        assert_eq!(failure.status, ExitStatus::NotFound);
        let message = "this table records hourly and daily usage only; months are not recorded";
        assert_eq!(failure.message, message);
        assert!(failure.hint.expect("a hint").starts_with("use -w daily; to record months"));
    }
}
