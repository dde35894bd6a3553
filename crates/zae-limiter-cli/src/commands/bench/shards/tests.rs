use std::io::{self, Write};
use std::sync::{Arc, Mutex};

use super::*;
use crate::printer::{Color, Output};
use crate::world::Terminal;

#[derive(Clone, Default)]
struct SharedBuffer(Arc<Mutex<Vec<u8>>>);

impl Write for SharedBuffer {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        self.0.lock().expect("nobody panics").extend_from_slice(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A row with a typical result.
fn row(shards: u32, per_second: f64, write_units: f64, ratio: Option<f64>) -> RowJson {
    let result = serde_json::json!({
        "store": "dynamodb:my-app?region=eu-west-1", "seconds": 10.004, "acquires": 90_361,
        "acquires_per_second": per_second, "admitted": 90_300, "refused": 61, "over_admitted": 0,
        "latency_ms": {"p50": 5.25, "p99": 31.0, "max": 1_204.5}, "round_trips_per_acquire": 0.4012,
        "write_units_per_acquire": write_units, "read_units_per_acquire": 0.0, "failed": 0,
        "entities": 1, "concurrency": 64, "consume": ["rpm:1", "tpm:100"],
        "limits": ["rpm:600/60s:600"], "baseline_per_second": null, "ratio_to_baseline": null
    });
    let result = serde_json::from_value(result).expect("a result of bench");
    RowJson { shards, shards_at_end: shards as usize, ratio, result }
}

fn printed(output: Output) -> String {
    let mut silent = row(64, 0.0, 0.0, None);
    silent.result.latency_ms = report::LatencyJson { p50: None, p99: None, max: None };
    silent.result.write_units_per_acquire = None;
    let rows = vec![row(1, 9_036.1, 0.4, Some(1.0)), row(8, 10_263.4, 0.2712, Some(1.14)), silent];
    let document = ShardsJson { processes: 8, over_admitted: 3, rows };
    let check = |shards: u32, over_admitted: i128| Checked {
        entity: Some(format!("row-1-shards-{shards}")),
        limit: "rpm".to_owned(),
        admitted: 700,
        allowed: 705,
        over_admitted,
    };
    let buffer = SharedBuffer::default();
    let sink = Box::new(io::sink());
    let mut printer =
        Printer::new(Box::new(buffer.clone()), sink, Terminal::default(), Color::Never);
    printer.output = output;
    document.print(&[check(1, 0), check(8, 3)], &mut printer);
    let text = buffer.0.lock().expect("nobody panics").clone();
    String::from_utf8(text).expect("text")
}

#[test]
fn the_table_has_a_row_for_each_number_of_shards() {
    insta::assert_snapshot!(printed(Output::Table));
}

#[test]
fn each_row_in_json_is_a_result_that_compare_can_read() {
    let text = printed(Output::Json);
    let document: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let earlier: BenchJson = serde_json::from_value(document["rows"][1].clone()).expect("a result");
    assert!((earlier.acquires_per_second - 10_263.4).abs() < 0.01);
    insta::assert_snapshot!(text);
}
