//! The summary of the demo: over-admission check, and comparison with the store's usage records.

use std::collections::BTreeMap;

use serde::Serialize;
use zae_limiter::model::MILLI;
use zae_limiter::store::UsageRecording;
use zae_limiter::{RateLimiter, Window};

use crate::chart::{Chart, Series};
use crate::columns::{Align, Cell, Columns};
use crate::failure::Failure;
use crate::figures::grouped;
use crate::line;
use crate::overadmission::LimitCheck;
use crate::printer::{Look, Printer};

use super::cast::{CAST, LIMITS, RESOURCE};
use super::tally::Tally;

/// The summary.
pub(super) struct Report<'a> {
    tally: &'a Tally,
    document: DemoJson,
}

#[derive(Serialize)]
struct DemoJson {
    store: String,
    seed: u64,
    seconds: f64,
    admitted: u64,
    refused: u64,
    failed: u64,
    underestimated: u64,
    over_admitted: i128,
    /// `None` if the store does not record usage itself.
    usage_adds_up: Option<bool>,
    limits: Vec<LimitJson>,
    per_second: Vec<SecondJson>,
}

#[derive(Serialize)]
struct LimitJson {
    entity_id: &'static str,
    limit_name: &'static str,
    capacity: i64,
    refill_amount: i64,
    refill_period_seconds: u64,
    /// Tokens that acquires took.
    admitted: i128,
    /// Tokens that leases refunded.
    given_back: i128,
    /// Tokens that leases took when they settled.
    added: i128,
    /// Capacity plus the refill during the run.
    allowed: i128,
    over_admitted: i128,
    /// Refused calls that exceeded this limit.
    refusals: u64,
    /// Settled tokens.
    used: i128,
    /// Tokens in the store's usage records.
    recorded: i128,
}

#[derive(Serialize)]
struct SecondJson {
    second: usize,
    admitted: u64,
    refused: u64,
}

impl<'a> Report<'a> {
    pub(super) async fn new(
        tally: &'a Tally,
        limiter: &RateLimiter,
        args: &super::Args,
        store: &str,
    ) -> Result<Self, Failure> {
        let recorded = recorded(limiter).await?;
        let limits: Vec<LimitJson> = tally
            .checks()
            .map(|(member, limit, check)| {
                let place = (CAST[member].id.to_owned(), LIMITS[limit].to_owned());
                let recorded = recorded.get(&place).copied().unwrap_or(0);
                let refusals = tally.members[member].refusals[limit];
                limit_json(member, limit, check, refusals, recorded)
            })
            .collect();
        let seconds = tally.seconds.iter().enumerate();
        #[expect(clippy::cast_precision_loss, reason = "an hour at most")]
        let elapsed = tally.elapsed_ms as f64 / 1_000.0;
        let document = DemoJson {
            store: store.to_owned(),
            seed: args.seed,
            seconds: elapsed,
            admitted: tally.admitted,
            refused: tally.refused,
            failed: tally.failed,
            underestimated: tally.underestimated,
            over_admitted: limits.iter().map(|limit| limit.over_admitted).sum(),
            usage_adds_up: (limiter.store().usage_recording() == UsageRecording::Immediate)
                .then(|| limits.iter().all(|limit| limit.recorded == limit.used)),
            limits,
            per_second: seconds
                .map(|(second, &(admitted, refused))| SecondJson { second, admitted, refused })
                .collect(),
        };
        Ok(Self { tally, document })
    }

    /// Whether nothing was over-admitted and the usage adds up.
    pub(super) fn is_sound(&self) -> bool {
        self.document.over_admitted == 0 && self.document.usage_adds_up != Some(false)
    }

    pub(super) fn print(&self, printer: &mut Printer) {
        if printer.is_json() {
            printer.json(&self.document);
            return;
        }
        self.print_chart(printer);
        self.print_limits(printer);
        self.print_verdict(printer);
    }

    fn print_chart(&self, printer: &mut Printer) {
        let series = |name: &str, look, of: fn(&(u64, u64)) -> u64| Series {
            name: name.to_owned(),
            look,
            values: self.tally.seconds.iter().map(of).collect(),
        };
        let chart = Chart {
            title: "Calls per second".to_owned(),
            labels: (0..self.tally.seconds.len()).map(|second| format!("{second} s")).collect(),
            series: vec![
                series("admitted", Look::Good, |(admitted, _)| *admitted),
                series("refused", Look::Bad, |(_, refused)| *refused),
            ],
        };
        for line in chart.lines(printer.terminal.columns().min(100), 8) {
            let line = line.paint(printer);
            printer.line(line);
        }
        printer.line("");
    }

    fn print_limits(&self, printer: &mut Printer) {
        use Align::{Left, Right};
        let heads = [
            ("ENTITY", Left),
            ("LIMIT", Left),
            ("ADMITTED", Right),
            ("GIVEN BACK", Right),
            ("ADDED", Right),
            ("ALLOWED", Right),
            ("OVER-ADMITTED", Right),
        ];
        let row = |limit: &LimitJson| {
            let look = if limit.over_admitted > 0 { Look::Bad } else { Look::Good };
            vec![
                Cell::from(limit.entity_id),
                Cell::from(limit.limit_name),
                Cell::from(grouped(limit.admitted)),
                Cell::new(Look::Dim, grouped(limit.given_back)),
                Cell::new(Look::Dim, grouped(limit.added)),
                Cell::from(grouped(limit.allowed)),
                Cell::new(look, grouped(limit.over_admitted)),
            ]
        };
        let rows: Vec<Vec<Cell>> = self.document.limits.iter().map(row).collect();
        let columns = if printer.terminal.stdout { printer.terminal.columns() } else { usize::MAX };
        let order = ["ADDED", "GIVEN BACK", "ALLOWED", "ADMITTED"];
        let (mut table, rows) = Columns::fit(&heads, rows, columns, &order);
        table.print(printer, &rows);
        let note = "ALLOWED is capacity + rate × time. Tokens GIVEN BACK can be admitted again; \
                    tokens ADDED when a call settled must be repaid before the next admission.";
        let note = line::wrap(note, columns.min(76));
        let note = note.lines().map(|line| printer.paint(Look::Dim, line)).collect::<Vec<_>>();
        printer.line(note.join("\n"));
        printer.line("");
    }

    fn print_verdict(&self, printer: &mut Printer) {
        let document = &self.document;
        let calls = document.admitted + document.refused;
        printer.line(format!(
            "{} calls in {} s: {} admitted, {} refused",
            grouped(calls),
            document.seconds,
            grouped(document.admitted),
            grouped(document.refused),
        ));
        if let Some(refusers) = self.refusers() {
            printer.line(format!("most refusals by: {refusers}"));
        }
        printer.line(format!(
            "failed and refunded: {}; used more than estimated: {}",
            grouped(document.failed),
            grouped(document.underestimated),
        ));
        let (look, what) = match document.over_admitted {
            0 => (Look::Good, " tokens, in every interval of the run, by each of "),
            _ => (Look::Bad, " tokens, in the worst interval of each of "),
        };
        let head = format!("over-admitted: {}", grouped(document.over_admitted));
        let head = printer.paint(look, head);
        printer.line(format!("{head}{what}{} limits", document.limits.len()));
        if document.usage_adds_up.is_none() {
            let note = "usage: on this store the aggregator records it later";
            let note = printer.paint(Look::Dim, note);
            printer.line(note);
            return;
        }
        let wrong: Vec<&LimitJson> =
            document.limits.iter().filter(|limit| limit.recorded != limit.used).collect();
        if wrong.is_empty() {
            let head = printer.paint(Look::Good, "usage adds up");
            printer.line(format!(
                "{head}: the store recorded what was settled, for each of {} limits",
                document.limits.len()
            ));
            return;
        }
        let head = printer.paint(Look::Bad, "usage does not add up");
        printer.line(format!("{head}:"));
        for limit in wrong {
            printer.line(format!(
                "  {} {}: {} settled, {} recorded",
                limit.entity_id,
                limit.limit_name,
                grouped(limit.used),
                grouped(limit.recorded),
            ));
        }
    }

    /// The three limits with the most refusals.
    fn refusers(&self) -> Option<String> {
        let mut limits: Vec<&LimitJson> =
            self.document.limits.iter().filter(|limit| limit.refusals > 0).collect();
        limits.sort_by_key(|limit| std::cmp::Reverse(limit.refusals));
        let named = limits.iter().take(3).map(|limit| {
            let times = grouped(limit.refusals);
            format!("{} of {} ({times})", limit.limit_name, limit.entity_id)
        });
        let named: Vec<String> = named.collect();
        (!named.is_empty()).then(|| named.join(", "))
    }
}

fn limit_json(
    member: usize,
    limit: usize,
    check: &LimitCheck,
    refusals: u64,
    recorded: i128,
) -> LimitJson {
    let rate = check.rate();
    LimitJson {
        entity_id: CAST[member].id,
        limit_name: LIMITS[limit],
        capacity: rate.capacity().whole_tokens(),
        refill_amount: rate.refill_amount().whole_tokens(),
        refill_period_seconds: rate.period_ms() / 1_000,
        admitted: check.admitted(),
        given_back: check.given_back(),
        added: check.added(),
        allowed: check.allowed(),
        over_admitted: check.over_admitted(),
        refusals,
        used: check.used(),
        recorded,
    }
}

/// Tokens in the store's usage records, by entity and limit.
async fn recorded(limiter: &RateLimiter) -> Result<BTreeMap<(String, String), i128>, Failure> {
    let mut millitokens: BTreeMap<(String, String), i128> = BTreeMap::new();
    let mut pages = limiter.usage().resource(RESOURCE).window(Window::Hourly).pages()?;
    while let Some(records) = pages.next_page().await? {
        for record in records {
            for (limit, consumed) in record.consumed {
                let place = (record.key.entity.to_string(), limit.to_string());
                *millitokens.entry(place).or_default() += i128::from(consumed.get());
            }
        }
    }
    Ok(millitokens.into_iter().map(|(place, sum)| (place, sum / i128::from(MILLI))).collect())
}
