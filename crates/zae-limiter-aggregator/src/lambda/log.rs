//! Writes log lines as JSON for CloudWatch, with metrics in the embedded metric format.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value as Json, json};
use zae_limiter_core::{Clock, format_time};

use super::Sink;
use crate::execute::Report;

/// The most errors of one batch that get a line of their own.
const ERRORS_MAX: usize = 20;

/// The namespace of the metrics in CloudWatch.
const METRICS: &str = "ZaeLimiter/Aggregator";

pub(super) struct Log {
    out: Sink,
    clock: Arc<dyn Clock>,
}

impl Log {
    pub(super) fn new(out: Sink, clock: Arc<dyn Clock>) -> Self {
        Self { out, clock }
    }

    pub(super) fn error(&mut self, message: &str, about: &Json) {
        self.line("ERROR", message, about);
    }

    /// Logs the errors of a batch, and a line with its metrics.
    pub(super) fn report(&mut self, table: &str, id: &str, report: &Report, took: Duration) {
        for error in report.errors.iter().take(ERRORS_MAX) {
            self.line("WARN", error, &json!({ "request_id": id }));
        }
        let more = report.errors.len().saturating_sub(ERRORS_MAX);
        if more > 0 {
            self.line("WARN", &format!("{more} more errors"), &json!({ "request_id": id }));
        }
        let metrics = [
            ("RecordsProcessed", report.processed),
            ("SnapshotsUpdated", report.snapshots_updated),
            ("RefillsWritten", report.refills_written),
            ("BucketsSplit", report.buckets_split),
            ("EventsArchived", report.events_archived),
            ("ForeignRecords", report.foreign),
            ("RecordsFailed", count(report.failed.len())),
            ("Errors", count(report.errors.len())),
        ];
        let mut names: Vec<Json> =
            metrics.iter().map(|(name, _)| json!({ "Name": name, "Unit": "Count" })).collect();
        names.push(json!({ "Name": "ProcessingTime", "Unit": "Milliseconds" }));
        let mut about = json!({
            "request_id": id,
            "TableName": table,
            "ProcessingTime": u64::try_from(took.as_millis()).unwrap_or(u64::MAX),
            "_aws": {
                "Timestamp": self.clock.now().as_millis(),
                "CloudWatchMetrics": [{
                    "Namespace": METRICS,
                    "Dimensions": [["TableName"]],
                    "Metrics": names,
                }],
            },
        });
        for (name, value) in metrics {
            about[name] = value.into();
        }
        self.line("INFO", "batch processed", &about);
    }

    fn line(&mut self, level: &str, message: &str, about: &Json) {
        let now = format_time(self.clock.now());
        let mut line = json!({ "timestamp": now, "level": level, "message": message });
        for (name, value) in about.as_object().into_iter().flatten() {
            line[name] = value.clone();
        }
        // There is no other place to report a failure of the log.
        let _ = writeln!(self.out, "{line}");
        let _ = self.out.flush();
    }
}

fn count(number: usize) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}

#[cfg(test)]
pub(super) mod tests {
    use std::io::Write;
    use std::sync::Mutex;

    use zae_limiter_core::{ManualClock, Timestamp};

    use super::*;

    #[derive(Clone, Default)]
    pub(in crate::lambda) struct Lines(pub(in crate::lambda) Arc<Mutex<Vec<u8>>>);

    impl Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().expect("nobody panics").write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_batch_logs_its_errors_and_one_line_of_metrics() {
        let lines = Lines::default();
        let clock = Arc::new(ManualClock::new(Timestamp::from_millis(1_794_751_200_000)));
        let mut log = Log::new(Box::new(lines.clone()), clock);
        let report = Report {
            processed: 30,
            snapshots_updated: 3,
            errors: (0..25).map(|number| format!("record {number}: bad")).collect(),
            failed: vec!["5".to_owned()],
            ..Report::default()
        };
        log.report("limits", "request-1", &report, Duration::from_millis(12));
        let text = String::from_utf8(lines.0.lock().expect("nobody panics").clone()).expect("text");
        let parsed: Vec<Json> =
            text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        assert_eq!(parsed.len(), ERRORS_MAX + 2);
        assert_eq!(parsed[ERRORS_MAX]["message"], "5 more errors");
        let line = &parsed[ERRORS_MAX + 1];
        assert_eq!((&line["RecordsProcessed"], &line["RecordsFailed"]), (&30.into(), &1.into()));
        // The line has a value for every metric and dimension that it declares.
        let metrics = &line["_aws"]["CloudWatchMetrics"][0];
        for metric in metrics["Metrics"].as_array().expect("metrics") {
            assert!(line[metric["Name"].as_str().expect("a name")].is_u64(), "{metric}");
        }
        assert_eq!(
            (&metrics["Dimensions"][0][0], &line["TableName"]),
            (&"TableName".into(), &"limits".into())
        );
    }
}
