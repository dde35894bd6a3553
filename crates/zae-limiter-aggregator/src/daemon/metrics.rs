//! The daemon's metrics, and the endpoint that Prometheus reads.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};

use crate::execute::Report;

/// The most bytes of a request that are read.
const REQUEST_MAX: u64 = 8 * 1_024;

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

    pub(super) fn set_stream_shards(&self, count: usize) {
        self.stream_shards.store(u64::try_from(count).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Stream records that were processed.
    pub fn records(&self) -> u64 {
        self.records.load(Ordering::Relaxed)
    }

    /// Name, kind, help text and value of every metric.
    fn all(&self) -> [(&'static str, &'static str, &'static str, u64); 10] {
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

/// Serves the metrics over HTTP.
///
/// # Errors
///
/// If the listener cannot accept connections any more.
pub async fn serve(listener: TcpListener, metrics: Arc<Metrics>) -> std::io::Result<()> {
    loop {
        let (stream, _) = listener.accept().await?;
        let metrics = Arc::clone(&metrics);
        // A client that closes the connection early is not an error.
        tokio::spawn(async move { drop(respond(stream, &metrics).await) });
    }
}

/// Handles one request, then closes the connection.
async fn respond(stream: TcpStream, metrics: &Metrics) -> std::io::Result<()> {
    use tokio::io::AsyncReadExt as _;
    let mut stream = BufReader::new(stream);
    let mut head = (&mut stream).take(REQUEST_MAX);
    let mut request = String::new();
    head.read_line(&mut request).await?;
    loop {
        let mut line = String::new();
        if head.read_line(&mut line).await? == 0 || line.trim().is_empty() {
            break;
        }
    }
    let (status, body) = match request.split_whitespace().nth(1) {
        Some("/metrics") => ("200 OK", metrics.text()),
        _ => ("404 Not Found", "the metrics are at /metrics\n".to_owned()),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\ncontent-type: text/plain; version=0.0.4\r\n\
         content-length: {}\r\nconnection: close\r\n\r\n",
        body.len()
    );
    stream.get_mut().write_all(head.as_bytes()).await?;
    stream.get_mut().write_all(body.as_bytes()).await?;
    stream.get_mut().shutdown().await
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
