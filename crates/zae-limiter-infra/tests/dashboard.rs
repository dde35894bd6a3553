//! The CloudWatch dashboard in `docs/` shows the metrics that the alarms of the stack watch.
#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

#[allow(dead_code, reason = "not every test uses all of it")]
mod common;

use std::collections::BTreeSet;

use common::cfn::Stack;
use serde_json::Value;
use zae_limiter_infra::StackOptions;

const DASHBOARD: &str = include_str!("../../../docs/dashboards/cloudwatch.json");

/// What AWS measures for every table, without an alarm on it.
const WITHOUT_ALARM: [&str; 2] = ["ConsumedReadCapacityUnits", "ConsumedWriteCapacityUnits"];

/// Namespace, name and dimensions of a metric.
type Metric = (String, String, Vec<(String, String)>);

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_else(|| panic!("not a text: {value}")).to_owned()
}

/// The metrics of the dashboard.
fn shown() -> BTreeSet<Metric> {
    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    let widgets = dashboard["widgets"].as_array().unwrap().iter();
    let metrics = widgets.flat_map(|widget| widget["properties"]["metrics"].as_array().unwrap());
    let metrics = metrics.map(|metric| {
        let words = metric.as_array().unwrap().iter().filter(|word| word.is_string()).map(text);
        let words: Vec<String> = words.collect();
        let (pairs, rest) = words[2..].as_chunks::<2>();
        assert!(rest.is_empty(), "{metric}");
        let dimensions = pairs.iter().map(|[name, value]| (name.clone(), value.clone()));
        (words[0].clone(), words[1].clone(), dimensions.collect())
    });
    metrics.collect()
}

/// The metrics that the alarms watch.
fn watched() -> BTreeSet<Metric> {
    let plan = StackOptions::new("my-app".parse().unwrap()).plan().unwrap();
    let stack = Stack::of(&plan, "code/1.zip");
    let queue = text(&stack.properties("DeadLetters")["QueueName"]);
    let alarms = stack.resources.values().filter(|one| one["Type"] == "AWS::CloudWatch::Alarm");
    let mut watched = BTreeSet::new();
    for properties in alarms.map(|alarm| &alarm["Properties"]) {
        let parts = properties["Metrics"].as_array().into_iter().flatten();
        let metrics = parts.map(|part| &part["MetricStat"]["Metric"]).chain([properties]);
        for metric in metrics.filter(|metric| metric["MetricName"].is_string()) {
            let dimensions = metric["Dimensions"].as_array().unwrap().iter().map(|one| {
                let value = text(&one["Value"]).replace("att:DeadLetters.QueueName", &queue);
                (text(&one["Name"]), value)
            });
            let dimensions = dimensions.collect();
            watched.insert((text(&metric["Namespace"]), text(&metric["MetricName"]), dimensions));
        }
    }
    watched
}

#[test]
fn the_dashboard_shows_every_metric_with_an_alarm_and_none_that_the_stack_lacks() {
    let (shown, watched) = (shown(), watched());
    assert!(watched.len() > 10, "{watched:?}");
    let missing: Vec<&Metric> = watched.difference(&shown).collect();
    assert!(missing.is_empty(), "not on the dashboard: {missing:?}");
    let table = vec![("TableName".to_owned(), "my-app".to_owned())];
    let of_aws = |metric: &&Metric| metric.0.starts_with("AWS/");
    for (namespace, name, dimensions) in shown.difference(&watched).filter(of_aws) {
        assert_eq!(namespace, "AWS/DynamoDB", "{name}");
        assert!(WITHOUT_ALARM.contains(&name.as_str()), "unknown: {name}");
        assert_eq!(*dimensions, table, "{name}");
    }
}

#[test]
fn widgets_do_not_overlap() {
    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    let mut cells = BTreeSet::new();
    for widget in dashboard["widgets"].as_array().unwrap() {
        let of = |name: &str| widget[name].as_u64().unwrap();
        assert!(of("x") + of("width") <= 24, "{widget}");
        for x in of("x")..of("x") + of("width") {
            for y in of("y")..of("y") + of("height") {
                assert!(cells.insert((x, y)), "{widget}");
            }
        }
    }
}

/// Lambda counts an invocation that returns records to be delivered again as a success.
#[test]
fn an_alarm_sees_records_that_fail_in_invocations_that_succeed() {
    let metric = ("ZaeLimiter/Aggregator", "RecordsFailed");
    let table = vec![("TableName".to_owned(), "my-app".to_owned())];
    let watched = watched();
    let found = watched.iter().find(|(namespace, name, _)| (&**namespace, &**name) == metric);
    assert_eq!(found.map(|(.., dimensions)| dimensions), Some(&table), "{watched:?}");
    let plan = StackOptions::new("my-app".parse().unwrap()).plan().unwrap();
    let stack = Stack::of(&plan, "code/1.zip");
    let alarm = stack.properties("FailedRecordsAlarm");
    assert_eq!(alarm["ComparisonOperator"], "GreaterThanThreshold");
    assert_eq!((alarm["Threshold"].as_u64(), &alarm["Statistic"]), (Some(0), &"Sum".into()));
    let without = StackOptions::new("my-app".parse().unwrap()).no_aggregator().plan().unwrap();
    assert!(!Stack::of(&without, "").resources.contains_key("FailedRecordsAlarm"));
}

#[test]
fn the_guide_names_every_alarm_and_the_time_that_dead_letters_leave() {
    let guide = include_str!("../../../docs/operations.md");
    let plan = StackOptions::new("my-app".parse().unwrap()).plan().unwrap();
    let stack = Stack::of(&plan, "code/1.zip");
    let alarms = stack.resources.values().filter(|one| one["Type"] == "AWS::CloudWatch::Alarm");
    let names: Vec<String> = alarms.map(|alarm| text(&alarm["Properties"]["AlarmName"])).collect();
    assert_eq!(names.len(), 7, "the guide says seven");
    for name in names {
        let name = name.strip_prefix("my-app").unwrap();
        assert!(guide.contains(&format!("| `…{name}` |")), "{name}");
    }
    // Of the 24 hours in the stream.
    let mapping = stack.properties("StreamMapping");
    assert_eq!(mapping["MaximumRecordAgeInSeconds"].as_u64(), Some(12 * 3_600));
    assert!(guide.contains("count on 12 hours"));
    let days = stack.properties("DeadLetters")["MessageRetentionPeriod"].as_u64();
    assert_eq!(days, Some(14 * 86_400));
    assert!(guide.contains("keeps the message\nfor 14 days"));
}
