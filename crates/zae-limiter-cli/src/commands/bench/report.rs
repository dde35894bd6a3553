//! The result of a bench run as a table and as JSON, with ratios to an earlier result.

use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use zae_limiter::store::Cost;

use crate::columns::{Align, Cell, Columns};
use crate::failure::Failure;
use crate::figures::grouped;
use crate::printer::{Look, Printer};

use super::check::Checked;
use super::load::Measured;

/// The document that scripts rely on, and that `--compare` reads.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct BenchJson {
    pub store: String,
    pub seconds: f64,
    pub acquires: u64,
    pub acquires_per_second: f64,
    pub admitted: u64,
    pub refused: u64,
    pub over_admitted: i128,
    pub latency_ms: LatencyJson,
    pub round_trips_per_acquire: Option<f64>,
    pub write_units_per_acquire: Option<f64>,
    pub read_units_per_acquire: Option<f64>,
    pub failed: u64,
    pub entities: usize,
    pub concurrency: usize,
    /// The amounts of each call. Results with other amounts or limits are not comparable.
    #[serde(default)]
    pub consume: Vec<String>,
    #[serde(default)]
    pub limits: Vec<String>,
    pub baseline_per_second: Option<f64>,
    pub ratio_to_baseline: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compared: Option<ComparedJson>,
}

#[derive(Debug, Deserialize, Serialize)]
pub(super) struct LatencyJson {
    pub p50: Option<f64>,
    pub p99: Option<f64>,
    pub max: Option<f64>,
}

/// This result divided by an earlier one.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct ComparedJson {
    pub acquires_per_second: Option<f64>,
    pub p50: Option<f64>,
    pub p99: Option<f64>,
    pub max: Option<f64>,
}

/// The parameters of the load, for the result.
pub(super) struct Setting {
    pub store: String,
    pub entities: usize,
    pub concurrency: usize,
    pub consume: Vec<String>,
    pub limits: Vec<String>,
    pub baseline: Option<f64>,
}

impl BenchJson {
    pub(super) fn new(setting: Setting, measured: &Measured, checked: &[Checked]) -> Self {
        let acquires = measured.admitted + measured.refused;
        let seconds = measured.elapsed.as_secs_f64();
        #[expect(clippy::cast_precision_loss, reason = "a figure to look at")]
        let rate = if seconds > 0.0 { acquires as f64 / seconds } else { 0.0 };
        #[expect(clippy::cast_precision_loss, reason = "figures to look at")]
        let per_acquire = |of: fn(&Cost) -> f64| {
            let cost = measured.cost.as_ref().filter(|_| acquires > 0)?;
            Some(rounded(of(cost) / acquires as f64, 10_000.0))
        };
        let latency = &measured.latency;
        Self {
            store: setting.store,
            seconds: rounded(seconds, 1_000.0),
            acquires,
            acquires_per_second: rounded(rate, 10.0),
            admitted: measured.admitted,
            refused: measured.refused,
            over_admitted: checked.iter().map(|limit| limit.over_admitted).sum(),
            latency_ms: LatencyJson {
                p50: latency.permille(500).map(millis),
                p99: latency.permille(990).map(millis),
                max: latency.max().map(millis),
            },
            round_trips_per_acquire: per_acquire(|cost| cost.round_trips as f64),
            write_units_per_acquire: per_acquire(|cost| cost.write_units),
            read_units_per_acquire: per_acquire(|cost| cost.read_units),
            failed: measured.failed,
            entities: setting.entities,
            concurrency: setting.concurrency,
            consume: setting.consume,
            limits: setting.limits,
            baseline_per_second: setting.baseline.map(|baseline| rounded(baseline, 10.0)),
            ratio_to_baseline: setting.baseline.and_then(|baseline| ratio(rate, baseline)),
            compared: None,
        }
    }

    /// Reads an earlier result.
    pub(super) fn read(path: &Path) -> Result<Self, Failure> {
        let file = path.display();
        let wrong = |message: String, error: &dyn std::error::Error| {
            let failure = Failure::usage(message).caused_by(error);
            failure.hint("create one: zae-limiter bench -o json > earlier.json")
        };
        let text = std::fs::read_to_string(path)
            .map_err(|error| wrong(format!("could not read {file}"), &error))?;
        serde_json::from_str(&text)
            .map_err(|error| wrong(format!("{file} is not a result of bench -o json"), &error))
    }

    /// Computes the ratios to an earlier result, and warns about different parameters.
    pub(super) fn compare(&mut self, earlier: &Self, printer: &mut Printer) {
        let scheme = |store: &str| store.split(':').next().unwrap_or_default().to_owned();
        for (what, now, then) in [
            ("store", scheme(&self.store), scheme(&earlier.store)),
            ("entities", grouped(self.entities as i128), grouped(earlier.entities as i128)),
            (
                "concurrency",
                grouped(self.concurrency as i128),
                grouped(earlier.concurrency as i128),
            ),
            ("taken", self.consume.join(", "), earlier.consume.join(", ")),
            ("limits", self.limits.join("; "), earlier.limits.join("; ")),
        ] {
            // Results of other programs may lack some fields.
            if now != then && !then.is_empty() {
                printer.warn(format!("{what}: {now} now, {then} in the earlier result"));
            }
        }
        let both = |now: Option<f64>, then: Option<f64>| ratio(now?, then?);
        let (now, then) = (&self.latency_ms, &earlier.latency_ms);
        self.compared = Some(ComparedJson {
            acquires_per_second: ratio(self.acquires_per_second, earlier.acquires_per_second),
            p50: both(now.p50, then.p50),
            p99: both(now.p99, then.p99),
            max: both(now.max, then.max),
        });
    }

    /// Prints the result and the check of the limits.
    pub(super) fn print(&self, checked: &[Checked], printer: &mut Printer) {
        if printer.is_json() {
            printer.json(self);
            return;
        }
        let entities = if self.entities == 1 { "entity" } else { "entities" };
        let callers = if self.concurrency == 1 { "caller" } else { "callers" };
        let mut rows = vec![
            ("store", self.store.clone()),
            (
                "load",
                format!(
                    "{} {entities}, {} {callers}, {} s",
                    grouped(self.entities as i128),
                    grouped(self.concurrency as i128),
                    self.seconds
                ),
            ),
            (
                "acquires",
                format!("{}, {}/s", grouped(self.acquires), whole(self.acquires_per_second)),
            ),
            ("admitted", grouped(self.admitted)),
            ("refused", grouped(self.refused)),
        ];
        if self.failed > 0 {
            rows.push(("failed", grouped(self.failed)));
        }
        let LatencyJson { p50, p99, max } = self.latency_ms;
        if let (Some(p50), Some(p99), Some(max)) = (p50, p99, max) {
            rows.push((
                "latency",
                format!("p50 {}, p99 {}, max {}", time(p50), time(p99), time(max)),
            ));
        }
        if let (Some(baseline), Some(ratio)) = (self.baseline_per_second, self.ratio_to_baseline) {
            let baseline = whole(baseline);
            let text =
                format!("{ratio} × the baseline of {baseline}/s: one UPDATE per transaction");
            rows.push(("ratio", text));
        }
        if let (Some(trips), Some(write), Some(read)) = (
            self.round_trips_per_acquire,
            self.write_units_per_acquire,
            self.read_units_per_acquire,
        ) {
            let text = format!("{trips} round trips, {write} write units, {read} read units");
            rows.push(("cost", format!("{text} per acquire")));
        }
        for (name, value) in rows {
            let name = printer.paint(Look::Head, format!("{name:<10}"));
            printer.line(format!("{name}{value}"));
        }
        printer.line("");
        print_checked(checked, printer);
        self.print_compared(printer);
    }

    fn print_compared(&self, printer: &mut Printer) {
        let Some(compared) = &self.compared else { return };
        let ratios = [
            ("acquires/s", compared.acquires_per_second),
            ("p50", compared.p50),
            ("p99", compared.p99),
            ("max", compared.max),
        ];
        let ratios: Vec<String> = ratios
            .iter()
            .filter_map(|(what, ratio)| ratio.map(|ratio| format!("{what} × {ratio}")))
            .collect();
        printer.line("");
        let head = printer.paint(Look::Head, "ratio to the earlier result: ");
        printer.line(format!("{head}{}", ratios.join(", ")));
    }
}

/// Warns that calls failed, with the first error.
pub(super) fn warn_of(failure: &Failure, printer: &mut Printer) {
    let causes = failure.causes.iter().fold(String::new(), |all, cause| all + ": " + cause);
    printer.warn(format!("calls failed: {}{causes}", failure.message));
}

pub(super) fn print_checked(checked: &[Checked], printer: &mut Printer) {
    use Align::{Left, Right};
    let mut table = Columns::new(&[
        ("ENTITY", Left),
        ("LIMIT", Left),
        ("ADMITTED", Right),
        ("ALLOWED", Right),
        ("OVER-ADMITTED", Right),
    ]);
    let row = |limit: &Checked| {
        let look = if limit.over_admitted > 0 { Look::Bad } else { Look::Good };
        let admitted = i128::try_from(limit.admitted).unwrap_or(i128::MAX);
        vec![
            Cell::from(limit.entity.as_deref().unwrap_or("(all)")),
            Cell::from(&limit.limit),
            Cell::from(grouped(admitted)),
            Cell::from(grouped(limit.allowed)),
            Cell::new(look, grouped(limit.over_admitted)),
        ]
    };
    let rows: Vec<Vec<Cell>> = checked.iter().map(row).collect();
    table.print(printer, &rows);
}

/// `0.3 µs`, `12.4 ms`, `1.2 s`.
pub(super) fn time(millis: f64) -> String {
    match millis {
        millis if millis < 1.0 => format!("{:.1} µs", millis * 1_000.0),
        millis if millis < 1_000.0 => format!("{millis:.1} ms"),
        millis => format!("{:.1} s", millis / 1_000.0),
    }
}

fn millis(duration: Duration) -> f64 {
    rounded(duration.as_secs_f64() * 1_000.0, 10_000.0)
}

pub(super) fn ratio(now: f64, then: f64) -> Option<f64> {
    (then > 0.0).then(|| rounded(now / then, 100.0))
}

fn rounded(number: f64, scale: f64) -> f64 {
    (number * scale).round() / scale
}

pub(super) fn whole(number: f64) -> String {
    #[expect(clippy::cast_possible_truncation, reason = "a rate, far below 2^127")]
    let number = number.round() as i128;
    grouped(number)
}
