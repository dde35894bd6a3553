//! The life cycle of a stack, with the real program and the real SDK against an AWS emulator.
#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

mod adoption;
mod aws;
mod enforced;
mod permissions;

use aws::{python, run};
use zae_limiter::dynamodb::aws::DynamoAddress;

/// A small program of every Linux as the aggregator; its function does not matter here.
const CODE: &str = "--bootstrap /bin/sh";

#[test]
fn a_stack_is_created_used_changed_and_deleted() {
    let deployed = run(&format!("deploy --name life {CODE} -o json")).json();
    assert_eq!(deployed["result"], "created");
    assert_eq!(deployed["outputs"]["AggregatorName"], "life-aggr");
    let again = run(&format!("deploy --name life {CODE}"));
    assert_eq!(again.code, 0, "{}", again.err);
    assert!(again.err.contains("nothing to do: stack life is up to date"), "{}", again.err);
    let changed = run(&format!("deploy --name life {CODE} --lambda-memory 512 -o json")).json();
    assert_eq!(changed["result"], "updated");
    assert_eq!(memory_of("life-aggr"), "512");

    // It is ready for principals that may only acquire: namespace and version exist.
    assert_eq!(run("resource set-defaults gpt-4 -l rpm:10 --name life").code, 0);
    let taken = run("acquire key-1 gpt-4 -c rpm:3 --name life -o json").json();
    assert_eq!(taken["limits"][0]["available"], 7);

    let status = run("status --name life -o json").json();
    assert_eq!(status["table"]["status"], "ACTIVE");
    assert_eq!(status["dead_letters"], 0);
    assert_eq!(status["versions"]["verdict"], "up to date");
    assert_eq!(run("check --name life -o json").json()["compatible"], true);
    let list = run("list -o json").json();
    assert!(list.as_array().unwrap().iter().any(|stack| stack["name"] == "life"), "{list}");

    // An upgrade has nothing to do, and leaves the changed option alone.
    let upgraded = run(&format!("upgrade --name life {CODE} -o json")).json();
    assert_eq!(upgraded["changed"], false);
    assert_eq!(memory_of("life-aggr"), "512");

    let asked = run("delete --name life");
    assert_eq!(asked.code, 2, "{}", asked.err);
    assert!(asked.err.contains("will be deleted") && asked.err.contains("--yes"), "{}", asked.err);
    let deleted = run("delete --name life --yes -o json").json();
    let kept = deleted["kept"][0]["name"].as_str().unwrap();
    assert!(kept.contains("archivebucket"), "{kept}");
    assert_eq!(run("status --name life").code, 4);
    assert_eq!(run("delete --name life --yes").code, 4);
    // The kept archive does not prevent a new stack of the same name.
    assert_eq!(run(&format!("deploy --name life {CODE} -o json")).json()["result"], "created");
    assert_eq!(run("delete --name life --yes").code, 0);
}

fn memory_of(function: &str) -> String {
    let line = format!(
        "print(make('lambda').get_function_configuration(FunctionName='{function}')['MemorySize'])"
    );
    python(&line).trim().to_owned()
}

#[test]
fn how_long_audit_events_are_kept_is_stored_in_the_table() {
    let stored = |namespace: &str| {
        run(&format!("-N {namespace} system get-defaults --name kept -o json")).json()
            ["audit_retention_days"]
            .clone()
    };
    let deploy = "deploy --name kept --no-aggregator --no-alarms";
    assert_eq!(run(deploy).code, 0);
    assert_eq!(stored("default"), 90);
    assert_eq!(run("namespace register early --name kept").code, 0);
    // Defaults are set and deleted beside it.
    assert_eq!(run("system set-defaults -l rpm:5 --name kept").code, 0);
    let changed = run(&format!("{deploy} --audit-retention-days 30"));
    assert_eq!(changed.code, 0, "{}", changed.err);
    assert_eq!(run("system delete-defaults --yes --name kept").code, 0);
    assert_eq!(run("system delete-defaults --yes --name kept").code, 4, "nothing but that is left");
    assert_eq!(run("namespace register late --name kept").code, 0);
    for namespace in ["default", "early", "late"] {
        assert_eq!(stored(namespace), 30, "{namespace}");
        assert_eq!(run(&format!("-N {namespace} entity create e --name kept")).code, 0);
    }
    let expiries = python(
        "import time\n\
         items = make('dynamodb').scan(TableName='kept')['Items']\n\
         made = [i for i in items if i.get('action', {}).get('S') == 'entity_created']\n\
         print([round((int(i['ttl']['N']) - time.time()) / 86400) for i in made])",
    );
    assert_eq!(expiries.trim(), "[30, 30, 30]");
    assert_eq!(run("delete --name kept --yes").code, 0);
}

#[test]
fn a_failed_deployment_is_explained_and_can_be_tried_again() {
    // A table of that name is there already.
    python(
        "make('dynamodb').create_table(TableName='taken', BillingMode='PAY_PER_REQUEST', \
         KeySchema=[{'AttributeName': 'a', 'KeyType': 'HASH'}], \
         AttributeDefinitions=[{'AttributeName': 'a', 'AttributeType': 'S'}])",
    );
    let options = "--no-aggregator --no-alarms";
    let failed = run(&format!("deploy --name taken {options}"));
    assert_eq!(failed.code, 1, "{} {}", failed.out, failed.err);
    assert!(failed.err.contains("error: stack taken is ROLLBACK_COMPLETE"), "{}", failed.err);
    assert!(failed.err.contains("cause: Table (DynamoDB::Table): taken already"), "{}", failed.err);
    assert!(failed.err.contains("hint: a table of that name exists"), "{}", failed.err);
    // The guide shows what is printed.
    let guide = include_str!("../../../../docs/operations.md");
    let marks = ["create failed", "already exists", "error:", "cause:", "hint:"];
    for line in failed.err.lines().filter(|line| marks.iter().any(|mark| line.contains(mark))) {
        assert!(guide.contains(line), "not in the guide: {line}");
    }
    // Once the conflicting table is deleted, the same command succeeds.
    python("make('dynamodb').delete_table(TableName='taken')");
    let better = run(&format!("deploy --name taken {options}"));
    assert_eq!(better.code, 0, "{}", better.err);
    assert!(better.err.contains("an earlier attempt failed"), "{}", better.err);
    assert_eq!(run("delete --name taken --yes").code, 0);
}

#[test]
fn stacks_of_others_are_left_alone() {
    let template = "Resources: {Q: {Type: 'AWS::SQS::Queue'}}";
    let make = format!(
        "make('cloudformation').create_stack(StackName='theirs', TemplateBody={template:?})"
    );
    python(&make);
    for command in ["deploy --no-aggregator", "delete --yes"] {
        let refused = run(&format!("{command} --name theirs"));
        assert_eq!(refused.code, 1, "{command}");
        assert!(refused.err.contains("not a limiter's"), "{}", refused.err);
    }
    let list = run("list -o json").json();
    assert!(!list.to_string().contains("theirs"), "{list}");
}

#[test]
fn stacks_without_tags_are_listed_as_what_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("stack.yaml").display().to_string();
    let written = run(&format!("cfn-template --output {file}"));
    assert_eq!(written.code, 0, "{}", written.err);
    let again = run(&format!("cfn-template {file}"));
    assert!(again.code == 1 && again.err.contains("replace it with --force"), "{}", again.err);
    assert_eq!(run(&format!("cfn-template {file} --force")).code, 0);
    python(&format!(
        "cfn = make('cloudformation')\n\
         off = ['EnableAggregator', 'EnableAlarms', 'EnableIam', 'EnableAuditArchival']\n\
         cfn.create_stack(StackName='by-hand', TemplateBody=open({file:?}).read(), \
            Parameters=[dict(ParameterKey=k, ParameterValue='false') for k in off])\n\
         queue = 'Resources: {{Q: {{Type: \"AWS::SQS::Queue\"}}}}'\n\
         cfn.create_stack(StackName='ZAEL-early', TemplateBody=queue)\n\
         later = queue + '\\nParameters: {{SnapshotWindows: {{Type: String}}, \
            SchemaVersion: {{Type: String}}}}' + '\\nOutputs: {{TableName: {{Value: a}}, TableArn: {{Value: b}}}}'\n\
         cfn.create_stack(StackName='untagged', TemplateBody=later, \
            Parameters=[dict(ParameterKey=k, ParameterValue='x') for k in ['SnapshotWindows', 'SchemaVersion']])"
    ));
    let list = run("list -o json").json();
    for (name, by) in [
        ("by-hand", "another tool, from our template (no tags)"),
        ("ZAEL-early", "an early Python client (no tags)"),
        ("untagged", "an early Python client (no tags)"),
    ] {
        let stack = list.as_array().unwrap().iter().find(|stack| stack["name"] == name);
        assert_eq!(stack.unwrap_or_else(|| panic!("{name}: {list}"))["deployed_by"], by);
        // They stay with whoever made them.
        let refused = run(&format!("delete --yes --name {name}"));
        assert_eq!(refused.code, 1, "{name}: {}", refused.err);
        assert!(refused.err.contains("update and delete the stack with"), "{}", refused.err);
    }
    assert_eq!(run("status --name by-hand -o json").json()["table"]["status"], "ACTIVE");
    python(
        "for name in ['by-hand', 'ZAEL-early', 'untagged']: \
         make('cloudformation').delete_stack(StackName=name)",
    );
}

#[test]
fn wrong_options_are_refused_before_anything_is_sent() {
    for (options, said) in [
        (
            "--lambda-timeout 901",
            "invalid value \"901\" for --lambda-timeout: it must be from 1 to 900",
        ),
        ("--role-name-format corp", "must contain {}"),
        ("--no-iam", "--no-iam"),
        ("--bootstrap /etc/hostname", "as the aggregator"),
        ("--bootstrap /bin/sh --architecture arm64", "built for"),
        ("--snapshot-windows weekly", "weekly"),
        ("--tag team", "KEY=VALUE"),
    ] {
        let refused = run(&format!("deploy --name wrong {options}"));
        assert_eq!(refused.code, 2, "{options}: {}", refused.err);
        assert!(refused.err.contains(said), "{options}: {}", refused.err);
    }
    assert_eq!(run("status --name wrong").code, 4);
}

#[test]
fn an_unreachable_account_is_unavailable() {
    let nobody = run("status --name nobody --endpoint-url http://127.0.0.1:9");
    assert_eq!(nobody.code, 3, "{}", nobody.err);
    assert!(nobody.err.contains("CloudFormation cannot be reached"), "{}", nobody.err);
}

#[test]
fn a_large_table_of_another_program_is_read_through() {
    let make = "t = make('dynamodb')\n\
        keys = [('PK','SK')] + [(f'GSI{i}PK', f'GSI{i}SK') for i in range(1, 5)]\n\
        schema = lambda k: [{'AttributeName': k[0], 'KeyType': 'HASH'}, {'AttributeName': k[1], 'KeyType': 'RANGE'}]\n\
        t.create_table(TableName='adopted', BillingMode='PAY_PER_REQUEST', KeySchema=schema(keys[0]),\n\
          AttributeDefinitions=[{'AttributeName': n, 'AttributeType': 'S'} for k in keys for n in k],\n\
          GlobalSecondaryIndexes=[{'IndexName': f'GSI{i}', 'KeySchema': schema(keys[i]), 'Projection': {'ProjectionType': 'ALL'}} for i in range(1, 5)])\n\
        for n in range(300):\n\
        \x20 t.put_item(TableName='adopted', Item={'PK': {'S': f'abcdefghijk/ENTITY#e-{n}'}, 'SK': {'S': '#META'}, 'entity_id': {'S': f'e-{n}'}, 'metadata': {'S': 'x' * 5000}})\n\
        t.put_item(TableName='adopted', Item={'PK': {'S': '_/SYSTEM#'}, 'SK': {'S': '#VERSION'}, 'schema_version': {'S': '0.9.0'}, 'updated_by': {'S': 'client:0.10.3'}})";
    python(make);
    let dry = run("upgrade --name adopted --dry-run -o json").json();
    assert_eq!(dry["migration"]["index_entries"], 300);
    let real = run("upgrade --name adopted -o json").json();
    assert_eq!(real["migration"]["index_entries"], 300);
    assert_eq!(run("check --name adopted -o json").json()["schema"], "0.10.0");
    let again = run("upgrade --name adopted -o json").json();
    assert_eq!(again["migration"], serde_json::Value::Null);
}

#[tokio::test]
async fn a_limiter_deploys_its_own_stack() {
    use zae_limiter::infra::StackOptions;
    use zae_limiter::{Limit, ensure_stack};

    let address = address();
    let options = || StackOptions::new("own".parse().unwrap()).no_aggregator();
    // Created, found as it is, changed.
    for options in [options(), options(), options().no_alarms()] {
        let builder = ensure_stack(&options, &address, None).await.unwrap();
        let limiter = builder.open().await.unwrap();
        limiter.set_resource_defaults("gpt-4", [Limit::per_minute("rpm", 10)]).await.unwrap();
        let lease = limiter.acquire("key-1", "gpt-4").take("rpm", 1).await.unwrap();
        lease.commit().await.unwrap();
    }
    let taken = run("available key-1 gpt-4 --name own -o json").json();
    assert_eq!(taken["limits"][0]["capacity"], 10);
    let alarms = "print(len([a for a in make('cloudwatch').describe_alarms()['MetricAlarms'] \
                  if a['AlarmName'].startswith('own-')]))";
    assert_eq!(python(alarms).trim(), "0");
    assert_eq!(run("delete --name own --yes").code, 0);
}

fn address() -> DynamoAddress {
    DynamoAddress {
        table: String::new(),
        region: Some("us-east-1".to_owned()),
        endpoint: Some(aws::endpoint().to_owned()),
    }
}

#[tokio::test]
async fn a_limiter_packs_its_own_aggregator_and_never_deploys_without_one() {
    use zae_limiter::ensure_stack;
    use zae_limiter::infra::{StackError, StackOptions};

    let options = || StackOptions::new("packed".parse().unwrap()).no_alarms();
    let absent = options().aggregator_file("/absent/zae-limiter");
    let refused = ensure_stack(&absent, &address(), None).await.map(drop);
    assert!(matches!(&refused, Err(StackError::NoAggregator(_))), "{refused:?}");
    let text = refused.unwrap_err().to_string();
    assert!(text.contains("/absent/zae-limiter") && text.contains("no_aggregator()"), "{text}");
    assert_eq!(run("status --name packed").code, 4, "nothing was created");

    let program = stripped();
    let found = options().aggregator_file(&*program);
    ensure_stack(&found, &address(), None).await.unwrap();
    assert_eq!(memory_of("packed-aggr"), "256");
    // It has an aggregator of this release now, and needs no executable for other changes.
    ensure_stack(&absent.lambda_memory(512), &address(), None).await.unwrap();
    assert_eq!(memory_of("packed-aggr"), "512");
    assert_eq!(run("delete --name packed --yes").code, 0);
}

/// This program without debug information, which would exceed Lambda's limit.
fn stripped() -> tempfile::TempPath {
    let file = tempfile::NamedTempFile::new().unwrap().into_temp_path();
    let program = env!("CARGO_BIN_EXE_zae-limiter");
    let mut strip = std::process::Command::new("strip");
    assert!(strip.arg("-o").arg(&file).arg(program).status().unwrap().success());
    file
}

#[test]
fn the_deployed_aggregator_records_usage() {
    let program = stripped();
    let zip = tempfile::tempdir().unwrap();
    let (file, code) = (zip.path().join("aggregator.zip"), program.display());
    let exported = run(&format!("lambda-export {} --bootstrap {code} -o json", file.display()));
    let exported = exported.json();
    assert!(exported["bytes"].as_u64().unwrap() < exported["unpacked_bytes"].as_u64().unwrap());
    let deployed = run(&format!("deploy --name booked --bootstrap {code} -o json")).json();
    let key = deployed["outputs"]["AggregatorCode"].as_str().unwrap();
    assert_eq!(key, format!("code/{}.zip", exported["sha256"].as_str().unwrap()));
    assert_eq!(run("resource set-defaults gpt-4 -l rpm:100 --name booked").code, 0);
    for _ in 0..3 {
        assert_eq!(run("acquire key-1 gpt-4 -c rpm:2 --name booked").code, 0);
    }
    // The emulator calls the function some time later, and later still when other tests keep it busy; each poll takes a
    // while, too. While it is busy, the hour may be recorded long before the day: then the command fails with status 4.
    let mut ran = run("usage list -e key-1 -r gpt-4 -w daily --name booked -o json");
    let is_booked = |ran: &aws::Ran| ran.code == 0 && ran.json()[0]["consumed"]["rpm"] == 6;
    for _ in 0..10_000 {
        if is_booked(&ran) {
            break;
        }
        ran = run("usage list -e key-1 -r gpt-4 -w daily --name booked -o json");
    }
    let status = run("status --name booked -o json").json();
    assert!(is_booked(&ran), "{} {}, the stack {status}", ran.out, ran.err);
    assert_eq!(status["dead_letters"], 0);
    assert_eq!(run("delete --name booked --yes").code, 0);
}

#[test]
fn usage_that_the_function_failed_to_record_is_recorded_by_aggregate_once() {
    // Its function is not an aggregator, and fails.
    let deployed = run(&format!("deploy --name redrive {CODE} -o json"));
    assert_eq!(deployed.code, 0, "{}", deployed.err);
    assert_eq!(run("resource set-defaults gpt-4 -l rpm:100 --name redrive").code, 0);
    assert_eq!(run("acquire key-1 gpt-4 -c rpm:5 --name redrive").code, 0);
    for _ in 0..2 {
        let ran = run("aggregate --once --name redrive");
        assert_eq!(ran.code, 0, "{}", ran.err);
        let list = run("usage list -e key-1 -r gpt-4 -w daily --name redrive -o json").json();
        assert_eq!(list[0]["consumed"]["rpm"], 5, "once, and not again: {list}");
    }
    assert_eq!(run("delete --name redrive --yes").code, 0);
}
