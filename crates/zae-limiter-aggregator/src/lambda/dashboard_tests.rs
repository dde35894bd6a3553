//! The dashboard and the queries in `docs/` use what the function writes.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value as Json, json};
use zae_limiter_core::{ManualClock, Timestamp};

use super::log::Log;
use super::log::tests::Lines;
use crate::execute::Report;

const DASHBOARD: &str = include_str!("../../../../docs/dashboards/cloudwatch.json");
const QUERIES: &str = include_str!("../../../../docs/dashboards/logs-insights.md");
const TEMPLATE: &str = include_str!("../../../zae-limiter-infra/src/template.yaml");

/// Fields that Logs Insights finds in every line, or in the lines that Lambda adds.
const AWS_FIELDS: [&str; 5] =
    ["@timestamp", "@type", "@duration", "@initDuration", "@maxMemoryUsed"];

/// The words of the query language that the queries use.
const LANGUAGE: [&str; 19] = [
    "fields", "filter", "stats", "sort", "limit", "by", "as", "in", "asc", "desc", "count", "sum",
    "avg", "max", "pct", "bin", "5m", "1h", "or",
];

/// The lines of a batch with an error, and of an event that does not parse.
fn lines() -> Vec<Json> {
    let lines = Lines::default();
    let clock = Arc::new(ManualClock::new(Timestamp::from_millis(1_794_751_200_000)));
    let mut log = Log::new(Box::new(lines.clone()), clock);
    let report = Report {
        errors: vec!["bad".to_owned()],
        failed: vec!["1".to_owned()],
        ..Report::default()
    };
    log.report("my-app", "request-1", &report, Duration::ZERO);
    log.error("could not parse the event", &json!({ "request_id": "request-1", "error": "bad" }));
    let text = String::from_utf8(lines.0.lock().expect("nobody panics").clone()).expect("text");
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

#[test]
fn the_dashboard_shows_every_metric_of_the_function() {
    let lines = lines();
    let declared = lines.iter().find_map(|line| line["_aws"]["CloudWatchMetrics"].get(0));
    let declared = declared.expect("a line with metrics");
    let names = declared["Metrics"].as_array().expect("metrics").iter();
    let written: BTreeSet<&str> = names.filter_map(|metric| metric["Name"].as_str()).collect();
    let dashboard: Json = serde_json::from_str(DASHBOARD).expect("JSON");
    let widgets = dashboard["widgets"].as_array().expect("widgets").iter();
    let metrics = widgets.flat_map(|one| one["properties"]["metrics"].as_array().expect("a list"));
    let ours = metrics.filter(|metric| metric[0] == declared["Namespace"]);
    let mut shown = BTreeSet::new();
    for metric in ours {
        assert_eq!((&metric[2], &metric[3]), (&declared["Dimensions"][0][0], &"my-app".into()));
        shown.insert(metric[1].as_str().expect("a name"));
    }
    assert_eq!(shown, written);
}

#[test]
fn an_alarm_of_the_stack_watches_the_records_that_fail() {
    let lines = lines();
    let line = lines.iter().find(|line| line["_aws"].is_object()).expect("a line with metrics");
    let declared = &line["_aws"]["CloudWatchMetrics"][0];
    assert_eq!(line["RecordsFailed"], 1);
    let (namespace, dimension) = (&declared["Namespace"], &declared["Dimensions"][0][0]);
    let metric =
        format!("Namespace: {namespace}\n      MetricName: RecordsFailed\n").replace('"', "");
    let dimension = format!("Dimensions: [{{ Name: {dimension}, Value: !Ref AWS::StackName }}]");
    let wanted = format!("{metric}      {}", dimension.replace('"', ""));
    assert!(TEMPLATE.contains(&wanted), "{wanted}");
}

/// The queries of the page, one for each block.
fn queries(page: &str) -> Vec<&str> {
    page.split("```text\n").skip(1).filter_map(|rest| rest.split("```").next()).collect()
}

/// The names in a query that are not of the language: fields, and what `as` names.
fn names(query: &str) -> BTreeSet<&str> {
    let outside_quotes = query.split('"').step_by(2);
    let is_of_a_word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '@';
    let words = outside_quotes.flat_map(|text| text.split(move |c: char| !is_of_a_word(c)));
    let names = words.filter(|word| word.chars().any(|c| c.is_ascii_alphabetic()));
    names.filter(|word| !LANGUAGE.contains(word)).collect()
}

/// What `as` names in a query.
fn named(query: &str) -> BTreeSet<&str> {
    let after = query.split(" as ").skip(1);
    after.filter_map(|rest| rest.split([' ', ',', '\n']).next()).collect()
}

#[test]
fn the_queries_use_fields_and_messages_that_the_function_writes() {
    let lines = lines();
    let objects = lines.iter().filter_map(Json::as_object);
    let written: BTreeSet<&str> =
        objects.flat_map(|line| line.keys().map(String::as_str)).collect();
    let queries = queries(QUERIES);
    assert!(queries.len() > 5, "the page has blocks");
    for query in queries {
        let named = named(query);
        for name in names(query).difference(&named) {
            let is_there = written.contains(name) || AWS_FIELDS.contains(name);
            assert!(is_there, "no line has {name}:\n{query}");
        }
        for message in query.split("message = \"").skip(1) {
            let message = message.split('"').next().expect("the rest of the query");
            assert!(lines.iter().any(|line| line["message"] == message), "{message}");
        }
    }
    let query = "fields @timestamp, Nonsense | filter level = \"x y\" | stats max(Errors) as most";
    assert_eq!(names(query), BTreeSet::from(["@timestamp", "Errors", "Nonsense", "level", "most"]));
    assert_eq!(named(query), BTreeSet::from(["most"]));
}
