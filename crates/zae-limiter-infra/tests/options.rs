//! Every option reaches the template, and invalid ones are rejected before anything is sent.
#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

#[allow(dead_code, reason = "not every test uses all of it")]
mod common;

use common::cfn::{Stack, parse, text};
use serde_json::{Value, json};
use zae_limiter_core::Window;
use zae_limiter_infra::{
    Architecture, Iam, NameFormat, ResourceIndex, RetainTable, StackOptions, TEMPLATE,
};

const ROLE: &str = "arn:aws-us-gov:iam::123456789012:role/mine";
const TOPIC: &str = "arn:aws:sns:eu-west-1:123456789012:pager";

fn options() -> StackOptions {
    StackOptions::new("my-app".parse().unwrap())
}

fn stack(options: &StackOptions) -> Stack {
    Stack::of(&options.plan().unwrap(), "code/abc.zip")
}

fn names(format: &str) -> NameFormat {
    format.parse().unwrap()
}

#[track_caller]
fn check(options: StackOptions, resource: &str, pointer: &str, wanted: Value) {
    let (before, after) = (stack(&self::options()), stack(&options));
    let at = |stack: &Stack| stack.properties(resource).pointer(pointer).cloned();
    assert_eq!(at(&after), Some(wanted.clone()));
    assert_ne!(at(&before), Some(wanted), "the default does the same");
}

#[test]
fn options_of_the_table_reach_the_table() {
    let table = "Table";
    check(options().enable_deletion_protection(), table, "/DeletionProtectionEnabled", json!(true));
    let days = "/PointInTimeRecoverySpecification/RecoveryPeriodInDays";
    check(options().pitr_recovery_days(7), table, days, json!("7"));
    let projection = "/GlobalSecondaryIndexes/1/Projection/ProjectionType";
    check(options().resource_index(ResourceIndex::All), table, projection, json!("ALL"));
    let kept = stack(&options().retain_table(RetainTable::Yes));
    assert_eq!(kept.resources[table]["DeletionPolicy"], "Retain");
}

#[test]
fn options_of_the_aggregator_reach_the_function() {
    let function = "Aggregator";
    let variable = |name: &str| format!("/Environment/Variables/{name}");
    check(options().lambda_timeout(30), function, "/Timeout", json!("30"));
    check(options().lambda_timeout(30), "DurationAlarm", "/Threshold", json!("24000"));
    check(options().lambda_memory(512), function, "/MemorySize", json!("512"));
    check(
        options().architecture(Architecture::Arm64),
        function,
        "/Architectures/0",
        json!("arm64"),
    );
    check(options().enable_tracing(), function, "/TracingConfig/Mode", json!("Active"));
    check(options().aggregator_role_arn(ROLE), function, "/Role", json!(ROLE));
    let windows = options().snapshot_windows([Window::Monthly, Window::Hourly]);
    check(windows, function, &variable("SNAPSHOT_WINDOWS"), json!("hourly,monthly"));
    check(options().usage_retention_days(7), function, &variable("SNAPSHOT_TTL_DAYS"), json!("7"));
    check(options().no_audit_archival(), function, &variable("ENABLE_ARCHIVAL"), json!("false"));
    check(options().log_retention_days(7), "AggregatorLogs", "/RetentionInDays", json!("7"));
    let transition = "/LifecycleConfiguration/Rules/0/Transitions/0/TransitionInDays";
    check(options().audit_archive_glacier_days(5), "ArchiveBucket", transition, json!("5"));
    assert_eq!(
        stack(&options().audit_retention_days(5)).outputs["AuditRetentionDays"]["Value"],
        "5"
    );
    assert!(stack(&options().enable_tracing()).has("TracingPolicy"));
    assert!(!stack(&options()).has("TracingPolicy"));
}

#[test]
fn names_and_boundaries_reach_all_policies_and_roles() {
    let all = options()
        .iam(Iam::Roles)
        .role_name_format(names("r-{}-x"))
        .policy_name_format(names("p-{}-y"))
        .permission_boundary("bound");
    let all = stack(&all);
    let (mut roles, mut policies) = (0, 0);
    for resource in all.resources.values() {
        let properties = &resource["Properties"];
        match resource["Type"].as_str().unwrap() {
            "AWS::IAM::Role" => {
                roles += 1;
                assert!(common::iam::like("r-my-app-*-x", &text(&properties["RoleName"])));
                let boundary = "arn:aws:iam::123456789012:policy/bound";
                assert_eq!(properties["PermissionsBoundary"], boundary);
            }
            "AWS::IAM::ManagedPolicy" => {
                policies += 1;
                let name = text(&properties["ManagedPolicyName"]);
                assert!(common::iam::like("p-my-app-*-y", &name), "{name}");
            }
            _ => {}
        }
    }
    assert_eq!((roles, policies), (4, 6));
    let arn = "arn:aws-cn:iam::123456789012:policy/bound";
    check(options().permission_boundary(arn), "AggregatorRole", "/PermissionsBoundary", json!(arn));
}

/// The types of the resources of a stack.
fn types(options: &StackOptions) -> Vec<String> {
    stack(options).resources.values().map(|one| text(&one["Type"])).collect()
}

#[test]
fn disabled_features_create_no_resources() {
    let has = |options: &StackOptions, kind: &str| types(options).iter().any(|one| one == kind);
    for kind in
        ["AWS::Lambda::Function", "AWS::SQS::Queue", "AWS::S3::Bucket", "AWS::Logs::LogGroup"]
    {
        assert!(has(&options(), kind), "{kind}");
        assert!(!has(&options().no_aggregator(), kind), "{kind}");
    }
    assert!(!stack(&options().no_aggregator()).has("AggregatorRole"));
    assert!(stack(&options().no_aggregator()).has("ReadThrottleAlarm"));
    assert!(!stack(&options().no_aggregator()).has("ErrorAlarm"));
    assert!(!has(&options().no_alarms(), "AWS::CloudWatch::Alarm"));
    let no_archive = stack(&options().no_audit_archival());
    assert!(no_archive.has("CodeBucket") && !no_archive.has("ArchiveBucket"));
    assert!(!no_archive.has("ArchivePolicy") && !no_archive.has("ArchiveBucketPolicy"));
    let no_iam = options().iam(Iam::None).aggregator_role_arn(ROLE);
    assert!(types(&no_iam).iter().all(|one| !one.starts_with("AWS::IAM")));
    assert!(has(&no_iam, "AWS::Lambda::Function"));
    let external = stack(&options().aggregator_role_arn(ROLE));
    assert!(!external.has("AggregatorRole") && external.has("AcquirePolicy"));
    let plain = stack(&options());
    assert!(!plain.has("AppRole") && !plain.has("AdminRole") && !plain.has("ReadRole"));
}

#[test]
fn without_code_the_stack_lacks_only_the_function() {
    let before = Stack::of(&options().plan().unwrap(), "");
    assert!(before.has("CodeBucket") && !before.has("Aggregator") && !before.has("StreamMapping"));
}

#[test]
fn every_alarm_notifies_the_topic() {
    let with = stack(&options().alarm_sns_topic(TOPIC));
    let mut alarms = 0;
    for (name, alarm) in &with.resources {
        if alarm["Type"] == "AWS::CloudWatch::Alarm" {
            alarms += 1;
            assert_eq!(alarm["Properties"]["AlarmActions"], json!([TOPIC]), "{name}");
            assert_eq!(stack(&options()).properties(name).get("AlarmActions"), None);
        }
    }
    assert_eq!(alarms, 7);
}

#[test]
fn throttling_alarms_cover_the_table_and_all_its_indexes() {
    let stack = stack(&options());
    for (alarm, metric) in
        [("ReadThrottleAlarm", "ReadThrottleEvents"), ("WriteThrottleAlarm", "WriteThrottleEvents")]
    {
        let metrics = stack.properties(alarm)["Metrics"].as_array().unwrap();
        let expression = text(&metrics[0]["Expression"]);
        let mut watched = Vec::new();
        for one in &metrics[1..] {
            assert!(expression.contains(&format!("FILL({}, 0)", text(&one["Id"]))));
            let of = &one["MetricStat"]["Metric"];
            assert_eq!(of["MetricName"], metric);
            assert_eq!(of["Dimensions"][0], json!({ "Name": "TableName", "Value": "my-app" }));
            watched.push(of.pointer("/Dimensions/1/Value").map(text));
        }
        let wanted = ["GSI1", "GSI2", "GSI3", "GSI4"].map(|name| Some(name.to_owned()));
        assert_eq!(watched[0], None);
        assert_eq!(watched[1..], wanted);
    }
}

#[test]
fn the_stream_filter_passes_bucket_changes_and_expired_audit_events() {
    let stack = stack(&options());
    let filters = stack.properties("StreamMapping")["FilterCriteria"]["Filters"].clone();
    let patterns: Vec<Value> = filters.as_array().unwrap().iter().map(pattern).collect();
    let passes = |event: &Value| patterns.iter().any(|pattern| matches(pattern, event));
    let event = |name: &str, pk: &str, sk: &str| {
        let keys = json!({ "PK": { "S": pk }, "SK": { "S": sk } });
        json!({ "eventName": name, "dynamodb": { "Keys": keys } })
    };
    let by_ttl = |mut event: Value| {
        event["userIdentity"] =
            json!({ "type": "Service", "principalId": "dynamodb.amazonaws.com" });
        event
    };
    let (bucket, audit) = ("abcdefghijk/BUCKET#key-1#gpt-4#0", "abcdefghijk/AUDIT#key-1");
    let entity = "abcdefghijk/ENTITY#key-1";
    assert!(passes(&event("INSERT", bucket, "#STATE")));
    assert!(passes(&event("MODIFY", bucket, "#STATE")));
    assert!(!passes(&by_ttl(event("REMOVE", bucket, "#STATE"))));
    assert!(!passes(&event("MODIFY", entity, "#USAGE#gpt-4#2026-11-15")), "its own writes");
    assert!(!passes(&event("MODIFY", entity, "#CONFIG#gpt-4")));
    assert!(passes(&by_ttl(event("REMOVE", audit, "#AUDIT#01HZX"))));
    assert!(!passes(&event("REMOVE", audit, "#AUDIT#01HZX")), "a purge by hand is no expiry");
    assert!(!passes(&event("INSERT", audit, "#AUDIT#01HZX")));
}

fn pattern(filter: &Value) -> Value {
    serde_json::from_str(filter["Pattern"].as_str().unwrap()).unwrap()
}

/// Lambda's filter rules, as far as the template uses them.
fn matches(pattern: &Value, event: &Value) -> bool {
    match pattern {
        Value::Object(all) => all.iter().all(|(key, inner)| matches(inner, &event[key])),
        Value::Array(any) => any.iter().any(|one| match one.get("prefix") {
            Some(prefix) => event.as_str().is_some_and(|e| e.starts_with(prefix.as_str().unwrap())),
            None => one == event,
        }),
        other => panic!("{other} in a pattern"),
    }
}

#[test]
fn invalid_options_are_rejected_with_the_rule() {
    let no_iam = || options().iam(Iam::None);
    let too_many = (0..46).fold(options(), |all, n| all.tag(format!("tag-{n}"), "x"));
    let cases: Vec<(StackOptions, &str, &str)> = vec![
        (options().lambda_timeout(0), "lambda-timeout", "from 1 to 900"),
        (options().lambda_timeout(901), "lambda-timeout", "from 1 to 900"),
        (options().lambda_memory(127), "lambda-memory", "from 128 to 10240"),
        (options().pitr_recovery_days(36), "pitr-recovery-days", "from 1 to 35"),
        (options().usage_retention_days(0), "usage-retention-days", "from 1"),
        (options().audit_retention_days(0), "audit-retention-days", "from 1"),
        (options().audit_archive_glacier_days(0), "audit-archive-glacier-days", "from 1"),
        (options().log_retention_days(8), "log-retention-days", "one of 1, 3, 5"),
        (options().snapshot_windows([]), "snapshot-windows", "at least one"),
        (options().alarm_sns_topic("pager"), "alarm-sns-topic", "ARN of a topic"),
        (options().alarm_sns_topic(TOPIC).no_alarms(), "alarm-sns-topic", "without alarms"),
        (options().aggregator_role_arn("mine"), "aggregator-role-arn", "ARN of a role"),
        (options().aggregator_role_arn(ROLE).no_aggregator(), "aggregator-role-arn", "without"),
        (options().permission_boundary("a b"), "permission-boundary", "name or its ARN"),
        (no_iam(), "no-iam", "aggregator-role-arn"),
        (no_iam().no_aggregator().permission_boundary("b"), "permission-boundary", "no-iam"),
        (options().role_name_format(names(&("x".repeat(60) + "{}"))), "role-name-format", "64"),
        (
            options().policy_name_format(names(&("x".repeat(120) + "{}"))),
            "policy-name-format",
            "128",
        ),
        (options().tag("aws:x", "1"), "tag", "aws:"),
        (options().tag("ManagedBy", "me"), "tag", "identifies limiter stacks"),
        (options().tag("", "1"), "tag", "1 to 128"),
        (options().tag("k", "v".repeat(257)), "tag", "256"),
        (options().tag("k", "a*b"), "tag", "letters"),
        (too_many, "tag", "43"),
    ];
    for (options, option, rule) in cases {
        let error = options.plan().expect_err(option);
        assert_eq!(error.option, option, "{error}");
        assert!(error.to_string().contains(rule), "{error}");
    }
}

#[test]
fn the_bounds_of_numbers_equal_those_of_the_template() {
    let template = parse(TEMPLATE);
    for (name, least, most) in
        [("LambdaTimeout", 1, 900), ("LambdaMemory", 128, 10_240), ("PitrRecoveryDays", 1, 35)]
    {
        let parameter = &template["Parameters"][name];
        assert_eq!((&parameter["MinValue"], &parameter["MaxValue"]), (&json!(least), &json!(most)));
    }
}

#[test]
fn the_defaults_equal_those_of_the_template() {
    let template = parse(TEMPLATE);
    for (name, value) in options().plan().unwrap().parameters {
        assert_eq!(text(&template["Parameters"][&name]["Default"]), value, "{name}");
    }
}

#[test]
fn no_arn_names_a_partition() {
    assert!(!TEMPLATE.contains("arn:aws:"));
}

#[test]
fn a_stack_has_the_identifying_tags() {
    let plan = options().tag("team", "gateway").plan().unwrap();
    let tag = |key: &str| plan.tags[key].clone();
    assert_eq!(tag("ManagedBy"), "zae-limiter");
    assert_eq!(tag("zae-limiter:name"), "my-app");
    assert_eq!(tag("team"), "gateway");
}
