//! Figures for Prometheus.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};

use crate::execute::Report;

/// The longest request that is read.
const REQUEST_MAX: u64 = 8 * 1_024;

/// What a daemon has done so far.
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
    shards: AtomicU64,
}

impl Metrics {
    pub(super) fn add(&self, report: &Report) {
        let count = |number: usize| u64::try_from(number).unwrap_or(u64::MAX);
        for (figure, by) in [
            (&self.records, report.processed),
            (&self.snapshots, report.snapshots_updated),
            (&self.refills, report.refills_written),
            (&self.split, report.buckets_split),
            (&self.archived, report.events_archived),
            (&self.foreign, report.foreign),
            (&self.failed, count(report.failed.len())),
            (&self.errors, count(report.errors.len())),
        ] {
            figure.fetch_add(by, Ordering::Relaxed);
        }
    }

    pub(super) fn retry(&self) {
        self.retries.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn set_shards(&self, shards: usize) {
        self.shards.store(u64::try_from(shards).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Records that were done.
    pub fn records(&self) -> u64 {
        self.records.load(Ordering::Relaxed)
    }

    /// What there is to tell: a figure's name, its kind, what it is, and how much.
    fn all(&self) -> [(&'static str, &'static str, &'static str, u64); 10] {
        let all = [
            ("records", "counter", "Records of the stream that were done", &self.records),
            ("snapshots_updated", "counter", "Usage records written", &self.snapshots),
            ("refills_written", "counter", "Buckets refilled", &self.refills),
            ("buckets_divided", "counter", "Buckets split", &self.split),
            ("events_archived", "counter", "Audit events archived", &self.archived),
            ("foreign_records", "counter", "Records of other applications", &self.foreign),
            ("failed_records", "counter", "Records passed over as bad", &self.failed),
            ("errors", "counter", "Errors", &self.errors),
            ("batches_retried", "counter", "Batches tried again", &self.retries),
            ("shards", "gauge", "Shards of the stream that are followed", &self.shards),
        ];
        all.map(|(name, kind, help, figure)| (name, kind, help, figure.load(Ordering::Relaxed)))
    }

    /// The figures by their names.
    pub fn figures(&self) -> BTreeMap<&'static str, u64> {
        self.all().into_iter().map(|(name, _, _, figure)| (name, figure)).collect()
    }

    /// The figures in the text format of Prometheus.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for (name, kind, help, figure) in self.all() {
            let suffix = if kind == "counter" { "_total" } else { "" };
            let name = format!("zae_limiter_aggregator_{name}{suffix}");
            let _ = writeln!(text, "# HELP {name} {help}.\n# TYPE {name} {kind}\n{name} {figure}");
        }
        text
    }
}

/// Answers whoever asks for the figures.
///
/// # Errors
///
/// When nobody can connect any more.
pub async fn serve(listener: TcpListener, metrics: Arc<Metrics>) -> std::io::Result<()> {
    loop {
        let (stream, _) = listener.accept().await?;
        let metrics = Arc::clone(&metrics);
        // One who hangs up is of no interest.
        tokio::spawn(async move { drop(answer(stream, &metrics).await) });
    }
}

/// One answer for each connection.
async fn answer(stream: TcpStream, metrics: &Metrics) -> std::io::Result<()> {
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
        _ => ("404 Not Found", "the figures are at /metrics\n".to_owned()),
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
