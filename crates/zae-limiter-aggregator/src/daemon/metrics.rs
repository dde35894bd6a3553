//! The daemon's metrics.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::execute::Report;

/// Counters of a daemon since its start.
#[derive(Debug, Default)]
pub struct Metrics {
    records: AtomicU64,
    snapshots: AtomicU64,
    refills: AtomicU64,
    split: AtomicU64,
    archived: AtomicU64,
    foreign: AtomicU64,
    failed: AtomicU64,
    errors: AtomicU64,
    retries: AtomicU64,
    missed: AtomicU64,
    stream_shards: AtomicU64,
}

impl Metrics {
    pub(super) fn add(&self, report: &Report) {
        let count = |number: usize| u64::try_from(number).unwrap_or(u64::MAX);
        for (metric, by) in [
            (&self.records, report.processed),
            (&self.snapshots, report.snapshots_updated),
            (&self.refills, report.refills_written),
            (&self.split, report.buckets_split),
            (&self.archived, report.events_archived),
            (&self.foreign, report.foreign),
            (&self.failed, count(report.failed.len())),
            (&self.errors, count(report.errors.len())),
        ] {
            metric.fetch_add(by, Ordering::Relaxed);
        }
    }

    pub(super) fn retry(&self) {
        self.retries.fetch_add(1, Ordering::Relaxed);
    }

    /// An error that concerns no single record, for example a call without an answer.
    pub(super) fn error(&self) {
        self.errors.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn missed(&self) {
        self.missed.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn set_stream_shards(&self, count: usize) {
        self.stream_shards.store(u64::try_from(count).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Stream records that were processed.
    pub fn records(&self) -> u64 {
        self.records.load(Ordering::Relaxed)
    }

    /// How often changes left the stream before a daemon could read them.
    pub fn times_missed(&self) -> u64 {
        self.missed.load(Ordering::Relaxed)
    }

    /// Name, kind, help text and value of every metric.
    fn all(&self) -> [(&'static str, &'static str, &'static str, u64); 11] {
        let all = [
            ("records", "counter", "Stream records processed", &self.records),
            ("snapshots_updated", "counter", "Usage records written", &self.snapshots),
            ("refills_written", "counter", "Buckets refilled", &self.refills),
            ("buckets_split", "counter", "Buckets split", &self.split),
            ("events_archived", "counter", "Audit events archived", &self.archived),
            ("foreign_records", "counter", "Records of other applications", &self.foreign),
            ("failed_records", "counter", "Invalid records skipped", &self.failed),
            ("errors", "counter", "Errors", &self.errors),
            ("batches_retried", "counter", "Batches retried", &self.retries),
            ("missed", "counter", "Times that changes left the stream unread", &self.missed),
            (
                "stream_shards",
                "gauge",
                "Stream shards that this daemon follows",
                &self.stream_shards,
            ),
        ];
        all.map(|(name, kind, help, metric)| (name, kind, help, metric.load(Ordering::Relaxed)))
    }

    /// The values of all metrics by name.
    pub fn figures(&self) -> BTreeMap<&'static str, u64> {
        self.all().into_iter().map(|(name, _, _, value)| (name, value)).collect()
    }

    /// The metrics in the text format of Prometheus.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for (name, kind, help, value) in self.all() {
            let suffix = if kind == "counter" { "_total" } else { "" };
            let name = format!("zae_limiter_aggregator_{name}{suffix}");
            let _ = writeln!(text, "# HELP {name} {help}.\n# TYPE {name} {kind}\n{name} {value}");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_grafana_dashboard_shows_every_metric_of_the_daemon() {
        let text = Metrics::default().text();
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let served: BTreeSet<&str> = lines.filter_map(|line| line.split(' ').next()).collect();
        let dashboard = include_str!("../../../../docs/dashboards/grafana.json");
        let words = dashboard.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
        let shown = words.filter(|word| word.starts_with("zae_limiter_aggregator_"));
        assert_eq!(shown.collect::<BTreeSet<&str>>(), served);
    }
}
