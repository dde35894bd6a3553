//! `usage list --plot`

use std::collections::BTreeMap;

use zae_limiter::model::{Usage, format_time};
use zae_limiter::{Pages, Timestamp, Window};

use crate::chart::{Chart, Series};
use crate::failure::Failure;
use crate::printer::{Look, Printer};

/// Height of the bars.
const ROWS: usize = 8;

/// By limit: the usage of each window, summed over all selected entities and resources.
type Sums = BTreeMap<String, BTreeMap<Timestamp, i64>>;

/// Draws a chart of the usage for each limit. Returns the number of records.
pub(super) async fn draw(
    printer: &mut Printer,
    window: Window,
    mut pages: Pages<Usage>,
) -> Result<u64, Failure> {
    let mut sums = Sums::new();
    let mut records = 0;
    while let Some(page) = pages.next_page().await? {
        records += page.len() as u64;
        printer.progress(format!("{records} records read"));
        for usage in page {
            for (limit, consumed) in usage.consumed {
                let windows = sums.entry(limit.to_string()).or_default();
                *windows.entry(usage.key.start).or_default() += consumed.whole_tokens();
            }
        }
    }
    let starts = || sums.values().flat_map(BTreeMap::keys).copied();
    let (Some(first), Some(last)) = (starts().min(), starts().max()) else { return Ok(records) };
    let all = windows_between(window, first, last);
    for (at, (limit, windows)) in sums.iter().enumerate() {
        if at > 0 {
            printer.line("");
        }
        let values = all.iter().map(|start| windows.get(start).copied().unwrap_or(0));
        let chart = Chart {
            title: format!("{limit}, {window}, from {} on (UTC)", window.label(all[0])),
            labels: all.iter().map(|start| label(window, *start)).collect(),
            series: vec![Series {
                name: limit.clone(),
                look: Look::Good,
                // A window with more refunds than takes is drawn as empty.
                values: values.map(|value| u64::try_from(value).unwrap_or(0)).collect(),
            }],
        };
        for line in chart.lines(printer.terminal.columns(), ROWS) {
            let line = line.paint(printer);
            printer.line(line);
        }
    }
    Ok(records)
}

/// Every window from the first to the last, including those without usage.
fn windows_between(window: Window, first: Timestamp, last: Timestamp) -> Vec<Timestamp> {
    let mut all = vec![first];
    let mut next = window.end(first);
    while next <= last && next > all[all.len() - 1] {
        all.push(next);
        next = window.end(next);
    }
    all
}

/// A short label: the hour, or the date at midnight.
fn label(window: Window, start: Timestamp) -> String {
    let text = format_time(start);
    match window {
        Window::Hourly if &text[11..16] == "00:00" => text[5..10].to_owned(),
        Window::Hourly => text[11..16].to_owned(),
        Window::Daily => text[5..10].to_owned(),
        Window::Monthly => text[..7].to_owned(),
    }
}
