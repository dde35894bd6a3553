//! The command-line options of a stack.

use clap::ValueEnum;
use zae_limiter::Window;
use zae_limiter_infra::{Iam, NameFormat, ResourceIndex, RetainTable, StackOptions};

use crate::failure::Failure;

/// Options of the stack. Missing ones get their defaults.
#[derive(clap::Args, Debug)]
pub(crate) struct OptionArgs {
    /// Windows of the usage records
    #[arg(
        long,
        value_name = "WINDOWS",
        value_enum,
        value_delimiter = ',',
        help_heading = "Aggregator",
        default_value = "hourly,daily"
    )]
    snapshot_windows: Vec<WindowArg>,

    /// Days to keep usage records
    #[arg(long, value_name = "DAYS", default_value_t = 90, help_heading = "Aggregator")]
    usage_retention_days: u32,

    /// Do not deploy the aggregator: no usage records, no audit archive, no proactive refill
    #[arg(long, overrides_with = "enable_aggregator", help_heading = "Aggregator")]
    no_aggregator: bool,

    /// Timeout of the aggregator's function, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60, help_heading = "Aggregator")]
    lambda_timeout: u32,

    /// Memory of the aggregator's function, in MB
    #[arg(long, value_name = "MB", default_value_t = 256, help_heading = "Aggregator")]
    lambda_memory: u32,

    /// Days to keep the aggregator's logs
    #[arg(long, value_name = "DAYS", default_value_t = 30, help_heading = "Aggregator")]
    log_retention_days: u32,

    /// Trace the aggregator with X-Ray
    #[arg(long, overrides_with = "no_tracing", help_heading = "Aggregator")]
    enable_tracing: bool,

    /// Days to keep audit events in the table; stored there for all programs that write them
    #[arg(long, value_name = "DAYS", default_value_t = 90, help_heading = "Audit")]
    audit_retention_days: u32,

    /// Do not archive expired audit events in S3
    #[arg(long, overrides_with = "enable_audit_archival", help_heading = "Audit")]
    no_audit_archival: bool,

    /// Days until archived events move to Glacier
    #[arg(long, value_name = "DAYS", default_value_t = 90, help_heading = "Audit")]
    audit_archive_glacier_days: u32,

    /// Days for which the table can be restored (point-in-time recovery)
    #[arg(long, value_name = "DAYS", default_value_t = 35, help_heading = "Table")]
    pitr_recovery_days: u32,

    /// Protect the table against deletion
    #[arg(long, overrides_with = "no_deletion_protection", help_heading = "Table")]
    enable_deletion_protection: bool,

    /// Keep the table when the stack is deleted
    #[arg(long, help_heading = "Table")]
    retain_table: bool,

    /// Attributes in the index by resource; `all` serves Python clients and doubles the write cost
    #[arg(long, value_enum, default_value_t, value_name = "KIND", help_heading = "Table")]
    gsi2_projection: ProjectionArg,

    /// Do not create alarms
    #[arg(long, overrides_with = "enable_alarms", help_heading = "Alarms")]
    no_alarms: bool,

    /// SNS topic that alarms notify
    #[arg(long, value_name = "ARN", help_heading = "Alarms")]
    alarm_sns_topic: Option<String>,

    /// Create policies for applications, administrators and readers, and the aggregator's role: the default
    #[arg(long, overrides_with = "no_iam", help_heading = "Permissions")]
    iam: bool,

    /// Create no policies and no roles
    #[arg(long, overrides_with = "iam", help_heading = "Permissions")]
    no_iam: bool,

    /// Also create roles for applications, administrators and readers
    #[arg(
        long,
        conflicts_with = "no_iam",
        overrides_with = "no_create_iam_roles",
        help_heading = "Permissions"
    )]
    create_iam_roles: bool,

    #[command(flatten)]
    defaults: Defaults,

    /// Existing role for the aggregator
    #[arg(long, value_name = "ARN", help_heading = "Permissions")]
    aggregator_role_arn: Option<String>,

    /// Permissions boundary of every role: the name or ARN of a policy
    #[arg(long, value_name = "POLICY", help_heading = "Permissions")]
    permission_boundary: Option<String>,

    /// Names of roles; {} stands for the default name
    #[arg(long, value_name = "FORMAT", help_heading = "Permissions")]
    role_name_format: Option<String>,

    /// Names of policies; {} stands for the default name
    #[arg(long, value_name = "FORMAT", help_heading = "Permissions")]
    policy_name_format: Option<String>,

    /// Tag on all resources of the stack; can be repeated
    #[arg(
        short,
        long,
        value_name = "KEY=VALUE",
        value_parser = key_and_value,
        help_heading = "Command options"
    )]
    tag: Vec<(String, String)>,
}

/// Options of the Python original that ask for the default. The last of a pair counts.
#[derive(clap::Args, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is an option of its own")]
struct Defaults {
    #[arg(long, hide = true, overrides_with = "create_iam_roles")]
    no_create_iam_roles: bool,
    #[arg(long, hide = true, overrides_with = "no_aggregator")]
    enable_aggregator: bool,
    #[arg(long, hide = true, overrides_with = "no_alarms")]
    enable_alarms: bool,
    #[arg(long, hide = true, overrides_with = "no_audit_archival")]
    enable_audit_archival: bool,
    #[arg(long, hide = true, overrides_with = "enable_tracing")]
    no_tracing: bool,
    #[arg(long, hide = true, overrides_with = "enable_deletion_protection")]
    no_deletion_protection: bool,
    #[arg(long, hide = true, overrides_with = "no_wait")]
    wait: bool,
}

/// A window of the usage records.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum WindowArg {
    Hourly,
    Daily,
    Monthly,
}

impl WindowArg {
    pub(crate) fn window(self) -> Window {
        match self {
            Self::Hourly => Window::Hourly,
            Self::Daily => Window::Daily,
            Self::Monthly => Window::Monthly,
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum ProjectionArg {
    /// Keys: a write to a bucket does not write the index.
    #[default]
    KeysOnly,
    /// All attributes, as in stacks of the Python client.
    All,
}

fn key_and_value(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) => Ok((key.to_owned(), value.to_owned())),
        None => Err("write KEY=VALUE".to_owned()),
    }
}

impl OptionArgs {
    /// The stack's options. Their rules are checked when they become a plan.
    pub(super) fn stack_options(&self, name: &str) -> Result<StackOptions, Failure> {
        let windows = self.snapshot_windows.iter().map(|one| one.window());
        let name = name.parse().map_err(zae_limiter::Error::Invalid)?;
        let mut options = StackOptions::new(name)
            .snapshot_windows(windows)
            .usage_retention_days(self.usage_retention_days)
            .audit_retention_days(self.audit_retention_days)
            .audit_archive_glacier_days(self.audit_archive_glacier_days)
            .pitr_recovery_days(self.pitr_recovery_days)
            .log_retention_days(self.log_retention_days)
            .lambda_timeout(self.lambda_timeout)
            .lambda_memory(self.lambda_memory)
            .iam(match (self.no_iam, self.create_iam_roles) {
                (true, _) => Iam::None,
                (false, true) => Iam::Roles,
                (false, false) => Iam::Policies,
            })
            .resource_index(match self.gsi2_projection {
                ProjectionArg::KeysOnly => ResourceIndex::KeysOnly,
                ProjectionArg::All => ResourceIndex::All,
            })
            .retain_table(if self.retain_table { RetainTable::Yes } else { RetainTable::No });
        type Switch = fn(StackOptions) -> StackOptions;
        let switches: [(bool, Switch); 5] = [
            (self.no_aggregator, StackOptions::no_aggregator),
            (self.no_alarms, StackOptions::no_alarms),
            (self.no_audit_archival, StackOptions::no_audit_archival),
            (self.enable_tracing, StackOptions::enable_tracing),
            (self.enable_deletion_protection, StackOptions::enable_deletion_protection),
        ];
        for (_, switch) in switches.into_iter().filter(|(is_on, _)| *is_on) {
            options = switch(options);
        }
        if let Some(arn) = &self.alarm_sns_topic {
            options = options.alarm_sns_topic(arn);
        }
        if let Some(arn) = &self.aggregator_role_arn {
            options = options.aggregator_role_arn(arn);
        }
        if let Some(policy) = &self.permission_boundary {
            options = options.permission_boundary(policy);
        }
        if let Some(format) = &self.role_name_format {
            options = options.role_name_format(name_format("role-name-format", format)?);
        }
        if let Some(format) = &self.policy_name_format {
            options = options.policy_name_format(name_format("policy-name-format", format)?);
        }
        for (key, value) in &self.tag {
            options = options.tag(key, value);
        }
        Ok(options)
    }
}

fn name_format(option: &'static str, format: &str) -> Result<NameFormat, Failure> {
    let parsed: Result<NameFormat, _> = format.parse();
    Ok(parsed.map_err(|error| zae_limiter_infra::InvalidOption { option, ..error })?)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        options: OptionArgs,
        #[arg(long, overrides_with = "wait")]
        no_wait: bool,
    }

    /// The parameters of the stack that these options give.
    fn parameter(words: &str, name: &str) -> String {
        let line = std::iter::once("deploy").chain(words.split_whitespace());
        let line = Line::try_parse_from(line).expect(words);
        let options = line.options.stack_options("my-app").expect("legal");
        options.plan().expect(words).parameters[name].clone()
    }

    #[test]
    fn iam_and_its_roles_are_as_in_the_python_original() {
        let role = "--aggregator-role-arn arn:aws:iam::123456789012:role/x";
        for (words, iam, roles) in [
            ("", "true", "false"),
            ("--iam", "true", "false"),
            ("--iam --create-iam-roles", "true", "true"),
            ("--create-iam-roles --no-create-iam-roles", "true", "false"),
            ("--no-create-iam-roles --create-iam-roles", "true", "true"),
            (&format!("--no-iam {role}"), "false", "false"),
            (&format!("--iam --no-iam {role}"), "false", "false"),
            ("--no-iam --no-aggregator", "false", "false"),
            ("--no-iam --iam", "true", "false"),
        ] {
            assert_eq!(parameter(words, "EnableIam"), iam, "{words}");
            assert_eq!(parameter(words, "EnableIamRoles"), roles, "{words}");
        }
        let both = Line::try_parse_from(["deploy", "--no-iam", "--create-iam-roles"]);
        assert_eq!(both.expect_err("both").kind(), clap::error::ErrorKind::ArgumentConflict);
    }

    #[test]
    fn the_last_of_a_pair_of_options_counts() {
        for (on, off, name, default) in [
            ("--enable-aggregator", "--no-aggregator", "EnableAggregator", "true"),
            ("--enable-alarms", "--no-alarms", "EnableAlarms", "true"),
            ("--enable-audit-archival", "--no-audit-archival", "EnableAuditArchival", "true"),
            ("--enable-tracing", "--no-tracing", "EnableTracing", "false"),
            (
                "--enable-deletion-protection",
                "--no-deletion-protection",
                "EnableDeletionProtection",
                "false",
            ),
        ] {
            assert_eq!(parameter("", name), default);
            assert_eq!(parameter(&format!("{off} {on}"), name), "true", "{on}");
            assert_eq!(parameter(&format!("{on} {off}"), name), "false", "{off}");
        }
    }
}
