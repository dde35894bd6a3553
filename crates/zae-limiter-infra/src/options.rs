//! The options of a stack.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use zae_limiter_core::{StackName, Window};

use crate::names::{InvalidOption, NameFormat, is_arn};
use crate::plan::{StackPlan, tag};
use crate::template::template;

/// The retention times that CloudWatch accepts, in days.
const LOG_RETENTIONS: [u32; 22] = [
    1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731, 1096, 1827, 2192, 2557, 2922,
    3288, 3653,
];
/// The longest names that IAM accepts, in characters.
const ROLE_NAME_MAX: usize = 64;
const POLICY_NAME_MAX: usize = 128;
/// The longest suffixes that the template appends to the names of roles and policies.
const LONGEST_ROLE: &str = "-admin";
const LONGEST_POLICY: &str = "-ns-full";
/// The most tags that a stack may have, including the limiter's own.
const TAGS_MAX: usize = 50;
/// The duration of an invocation that raises the alarm, in percent of the timeout.
const DURATION_ALARM_PERCENT: u32 = 80;

/// The projection of the index by resource.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ResourceIndex {
    /// Keys only: updating a bucket does not write to the index.
    #[default]
    KeysOnly,
    /// All attributes, for readers of the Python client. Every write costs twice as much.
    All,
}

/// The processor of the aggregator's function.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Architecture {
    /// Intel and AMD.
    #[default]
    X86_64,
    /// Graviton.
    Arm64,
}

impl Architecture {
    /// The name that Lambda uses.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64",
            Self::Arm64 => "arm64",
        }
    }
}

/// Whether the table is kept when the stack is deleted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RetainTable {
    /// The table is deleted with the stack.
    #[default]
    No,
    /// The table is kept, with all its data.
    Yes,
}

/// Which IAM resources the stack creates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Iam {
    /// None: deploying needs no permissions in IAM.
    None,
    /// Policies, and the aggregator's role.
    #[default]
    Policies,
    /// As `Policies`, and roles for applications, administrators and readers.
    Roles,
}

/// The options of a stack. All but the name have defaults.
///
/// ```
/// use zae_limiter_infra::StackOptions;
///
/// let plan = StackOptions::new("my-app".parse()?)
///     .log_retention_days(7)
///     .tag("team", "gateway")
///     .plan()?;
/// assert_eq!(plan.parameters["LogRetentionDays"], "7");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct StackOptions {
    name: StackName,
    snapshot_windows: BTreeSet<Window>,
    usage_retention_days: u32,
    audit_retention_days: u32,
    aggregator: bool,
    architecture: Option<Architecture>,
    aggregator_file: Option<PathBuf>,
    pitr_recovery_days: u32,
    log_retention_days: u32,
    lambda_timeout: u32,
    lambda_memory: u32,
    alarms: bool,
    alarm_sns_topic: Option<String>,
    permission_boundary: Option<String>,
    role_names: NameFormat,
    policy_names: NameFormat,
    audit_archival: bool,
    audit_archive_glacier_days: u32,
    tracing: bool,
    iam: Iam,
    aggregator_role_arn: Option<String>,
    deletion_protection: bool,
    retain_table: RetainTable,
    resource_index: ResourceIndex,
    tags: BTreeMap<String, String>,
}

impl StackOptions {
    /// Options for a stack of that name. Its table has the same name.
    pub fn new(name: StackName) -> Self {
        Self {
            name,
            snapshot_windows: BTreeSet::from([Window::Hourly, Window::Daily]),
            usage_retention_days: 90,
            audit_retention_days: 90,
            aggregator: true,
            architecture: None,
            aggregator_file: None,
            pitr_recovery_days: 35,
            log_retention_days: 30,
            lambda_timeout: 60,
            lambda_memory: 256,
            alarms: true,
            alarm_sns_topic: None,
            permission_boundary: None,
            role_names: NameFormat::default(),
            policy_names: NameFormat::default(),
            audit_archival: true,
            audit_archive_glacier_days: 90,
            tracing: false,
            iam: Iam::default(),
            aggregator_role_arn: None,
            deletion_protection: false,
            retain_table: RetainTable::default(),
            resource_index: ResourceIndex::default(),
            tags: BTreeMap::new(),
        }
    }

    /// The name of the stack.
    pub fn name(&self) -> &StackName {
        &self.name
    }

    /// Whether the stack has an aggregator.
    pub fn has_aggregator(&self) -> bool {
        self.aggregator
    }

    /// How long audit events stay in the table, in days.
    pub fn audit_retention(&self) -> u32 {
        self.audit_retention_days
    }

    /// Sets the windows of usage records. Default: hourly and daily.
    #[must_use]
    pub fn snapshot_windows(mut self, windows: impl IntoIterator<Item = Window>) -> Self {
        self.snapshot_windows = windows.into_iter().collect();
        self
    }

    /// Sets how long usage records are kept, in days. Default: 90.
    #[must_use]
    pub fn usage_retention_days(mut self, days: u32) -> Self {
        self.usage_retention_days = days;
        self
    }

    /// Sets how long audit events stay in the table, in days. Default: 90.
    #[must_use]
    pub fn audit_retention_days(mut self, days: u32) -> Self {
        self.audit_retention_days = days;
        self
    }

    /// Leaves out the aggregator: no usage records, no archive, no early refills.
    #[must_use]
    pub fn no_aggregator(mut self) -> Self {
        self.aggregator = false;
        self
    }

    /// Sets the processor of the aggregator's function. Default: that of the executable.
    #[must_use]
    pub fn architecture(mut self, architecture: Architecture) -> Self {
        self.architecture = Some(architecture);
        self
    }

    /// The processor of the aggregator's function, if it was set.
    pub fn wanted_architecture(&self) -> Option<Architecture> {
        self.architecture
    }

    /// Names the executable `zae-limiter`, or the zip file of the release, that a program deploys as the
    /// aggregator. Without it, [`Search`](crate::Search) finds the executable. The plan of the stack does not
    /// depend on it.
    #[must_use]
    pub fn aggregator_file(mut self, file: impl Into<PathBuf>) -> Self {
        self.aggregator_file = Some(file.into());
        self
    }

    /// The file that [`aggregator_file`](Self::aggregator_file) has named.
    pub fn named_aggregator_file(&self) -> Option<&Path> {
        self.aggregator_file.as_deref()
    }

    /// Sets how far back the table can be restored, in days. Default: 35, the maximum.
    #[must_use]
    pub fn pitr_recovery_days(mut self, days: u32) -> Self {
        self.pitr_recovery_days = days;
        self
    }

    /// Sets how long the aggregator's logs are kept, in days. Default: 30.
    #[must_use]
    pub fn log_retention_days(mut self, days: u32) -> Self {
        self.log_retention_days = days;
        self
    }

    /// Sets the timeout of an invocation of the aggregator, in seconds. Default: 60.
    #[must_use]
    pub fn lambda_timeout(mut self, seconds: u32) -> Self {
        self.lambda_timeout = seconds;
        self
    }

    /// Sets the memory of the aggregator, in MB. Default: 256.
    #[must_use]
    pub fn lambda_memory(mut self, megabytes: u32) -> Self {
        self.lambda_memory = megabytes;
        self
    }

    /// Leaves out the alarms.
    #[must_use]
    pub fn no_alarms(mut self) -> Self {
        self.alarms = false;
        self
    }

    /// Sets the SNS topic that alarms notify.
    #[must_use]
    pub fn alarm_sns_topic(mut self, arn: impl Into<String>) -> Self {
        self.alarm_sns_topic = Some(arn.into());
        self
    }

    /// Sets the permissions boundary of every role: the ARN of a policy, or its name in the same
    /// account.
    #[must_use]
    pub fn permission_boundary(mut self, policy: impl Into<String>) -> Self {
        self.permission_boundary = Some(policy.into());
        self
    }

    /// Sets the pattern of role names.
    #[must_use]
    pub fn role_name_format(mut self, format: NameFormat) -> Self {
        self.role_names = format;
        self
    }

    /// Sets the pattern of policy names.
    #[must_use]
    pub fn policy_name_format(mut self, format: NameFormat) -> Self {
        self.policy_names = format;
        self
    }

    /// Leaves out the archive: expired audit events are lost.
    #[must_use]
    pub fn no_audit_archival(mut self) -> Self {
        self.audit_archival = false;
        self
    }

    /// Sets after how many days archived events move to Glacier. Default: 90.
    #[must_use]
    pub fn audit_archive_glacier_days(mut self, days: u32) -> Self {
        self.audit_archive_glacier_days = days;
        self
    }

    /// Sends traces of the aggregator to X-Ray.
    #[must_use]
    pub fn enable_tracing(mut self) -> Self {
        self.tracing = true;
        self
    }

    /// Sets which IAM resources the stack creates. Default: policies.
    #[must_use]
    pub fn iam(mut self, iam: Iam) -> Self {
        self.iam = iam;
        self
    }

    /// Sets an existing role for the aggregator.
    #[must_use]
    pub fn aggregator_role_arn(mut self, arn: impl Into<String>) -> Self {
        self.aggregator_role_arn = Some(arn.into());
        self
    }

    /// Protects the table against deletion.
    #[must_use]
    pub fn enable_deletion_protection(mut self) -> Self {
        self.deletion_protection = true;
        self
    }

    /// Sets whether the table is kept when the stack is deleted.
    #[must_use]
    pub fn retain_table(mut self, retain: RetainTable) -> Self {
        self.retain_table = retain;
        self
    }

    /// Sets the projection of the index by resource.
    #[must_use]
    pub fn resource_index(mut self, holds: ResourceIndex) -> Self {
        self.resource_index = holds;
        self
    }

    /// Adds a tag to the stack and all its resources.
    #[must_use]
    pub fn tag(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.tags.insert(key.into(), value.into());
        self
    }

    /// Checks all options and builds the plan.
    ///
    /// # Errors
    ///
    /// The first option that is invalid, or that contradicts another one.
    pub fn plan(&self) -> Result<StackPlan, InvalidOption> {
        self.check_numbers()?;
        self.check_arns()?;
        self.check_names()?;
        self.check_tags()?;
        self.check_together()?;
        let mut tags = self.tags.clone();
        tags.extend(tag::ours(&self.name, self.retain_table, self.aggregator));
        Ok(StackPlan {
            name: self.name.clone(),
            template: template(self.retain_table),
            parameters: self.parameters(),
            tags,
            has_aggregator: self.aggregator,
        })
    }

    fn check_numbers(&self) -> Result<(), InvalidOption> {
        let ranges = [
            ("usage-retention-days", self.usage_retention_days, 1, 36_500),
            ("audit-retention-days", self.audit_retention_days, 1, 36_500),
            ("pitr-recovery-days", self.pitr_recovery_days, 1, 35),
            ("lambda-timeout", self.lambda_timeout, 1, 900),
            ("lambda-memory", self.lambda_memory, 128, 10_240),
            ("audit-archive-glacier-days", self.audit_archive_glacier_days, 1, 3_650),
        ];
        for (option, value, least, most) in ranges {
            if !(least..=most).contains(&value) {
                let rule = format!("must be from {least} to {most}");
                return Err(InvalidOption::new(option, value, &rule));
            }
        }
        if !LOG_RETENTIONS.contains(&self.log_retention_days) {
            let known: Vec<String> = LOG_RETENTIONS.iter().map(u32::to_string).collect();
            let rule = format!("must be one of {}", known.join(", "));
            return Err(InvalidOption::new("log-retention-days", self.log_retention_days, &rule));
        }
        if self.snapshot_windows.is_empty() {
            let rule = "must name at least one of hourly, daily, monthly";
            return Err(InvalidOption::new("snapshot-windows", "", rule));
        }
        Ok(())
    }

    fn check_arns(&self) -> Result<(), InvalidOption> {
        if let Some(arn) = &self.alarm_sns_topic
            && !is_arn(arn, "sns", "")
        {
            let rule = "must be the ARN of a topic, arn:aws:sns:REGION:ACCOUNT:NAME";
            return Err(InvalidOption::new("alarm-sns-topic", arn, rule));
        }
        if let Some(arn) = &self.aggregator_role_arn
            && !is_arn(arn, "iam", "role/")
        {
            let rule = "must be the ARN of a role, arn:aws:iam::ACCOUNT:role/NAME";
            return Err(InvalidOption::new("aggregator-role-arn", arn, rule));
        }
        if let Some(policy) = &self.permission_boundary {
            let is_name = !policy.is_empty()
                && policy.len() <= POLICY_NAME_MAX
                && policy.chars().all(|c| c.is_ascii_alphanumeric() || "+=,.@_-/".contains(c));
            if !is_name && !is_arn(policy, "iam", "policy/") {
                let rule = "must be a policy's name or its ARN, arn:aws:iam::ACCOUNT:policy/NAME";
                return Err(InvalidOption::new("permission-boundary", policy, rule));
            }
        }
        Ok(())
    }

    fn check_names(&self) -> Result<(), InvalidOption> {
        let roles = ("role-name-format", &self.role_names, LONGEST_ROLE, ROLE_NAME_MAX);
        let policies = ("policy-name-format", &self.policy_names, LONGEST_POLICY, POLICY_NAME_MAX);
        for (option, format, longest, most) in [roles, policies] {
            let name = format.apply(&format!("{}{longest}", self.name));
            if name.len() > most {
                let rule = format!("is longer than the {most} characters that IAM accepts");
                return Err(InvalidOption::new(option, name, &rule));
            }
        }
        Ok(())
    }

    fn check_tags(&self) -> Result<(), InvalidOption> {
        let wrong = |value: &str, rule: &str| Err(InvalidOption::new("tag", value, rule));
        let most = TAGS_MAX - tag::ALL.len();
        if self.tags.len() > most {
            let rule = format!("are too many tags; use at most {most}");
            return wrong(&self.tags.len().to_string(), &rule);
        }
        for (key, value) in &self.tags {
            if key.is_empty() || key.chars().count() > 128 {
                return wrong(key, "must have a key of 1 to 128 characters");
            }
            if value.chars().count() > 256 {
                return wrong(key, "has a value of more than 256 characters");
            }
            if key.to_ascii_lowercase().starts_with("aws:") {
                return wrong(key, "begins with aws:, which AWS reserves");
            }
            if tag::ALL.contains(&key.as_str()) {
                return wrong(key, "is a tag that identifies limiter stacks; choose another");
            }
            let is_legal = |c: char| c.is_alphanumeric() || " _.:/=+-@".contains(c);
            if !key.chars().chain(value.chars()).all(is_legal) {
                return wrong(key, "may contain only letters, digits, spaces and _ . : / = + - @");
            }
        }
        Ok(())
    }

    fn check_together(&self) -> Result<(), InvalidOption> {
        if self.iam == Iam::None && self.aggregator && self.aggregator_role_arn.is_none() {
            let rule = "leaves the aggregator without a role; give one with aggregator-role-arn, \
                        or use no-aggregator";
            return Err(InvalidOption::new("no-iam", "true", rule));
        }
        if self.iam == Iam::None && self.permission_boundary.is_some() {
            let rule = "has no effect with no-iam, which creates no roles";
            let policy = self.permission_boundary.as_deref().unwrap_or_default();
            return Err(InvalidOption::new("permission-boundary", policy, rule));
        }
        if !self.aggregator
            && let Some(arn) = &self.aggregator_role_arn
        {
            let rule = "has no effect without the aggregator";
            return Err(InvalidOption::new("aggregator-role-arn", arn, rule));
        }
        if !self.alarms
            && let Some(arn) = &self.alarm_sns_topic
        {
            return Err(InvalidOption::new("alarm-sns-topic", arn, "has no effect without alarms"));
        }
        Ok(())
    }

    fn parameters(&self) -> BTreeMap<String, String> {
        let windows: Vec<&str> = self.snapshot_windows.iter().map(|one| one.as_str()).collect();
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        let boundary = text(&self.permission_boundary);
        let is_arn = boundary.starts_with("arn:");
        let (boundary_arn, boundary_name) =
            if is_arn { (boundary, String::new()) } else { (String::new(), boundary) };
        // In milliseconds; the timeout is in seconds.
        let alarming = self.lambda_timeout * 1_000 / 100 * DURATION_ALARM_PERCENT;
        let all = [
            ("EnableDeletionProtection", self.deletion_protection.to_string()),
            ("PitrRecoveryDays", self.pitr_recovery_days.to_string()),
            ("ResourceIndexProjection", projection(self.resource_index).to_owned()),
            ("EnableAggregator", self.aggregator.to_string()),
            (StackPlan::ARCHITECTURE, self.architecture.unwrap_or_default().as_str().to_owned()),
            ("AggregatorRoleArn", text(&self.aggregator_role_arn)),
            ("LambdaTimeout", self.lambda_timeout.to_string()),
            ("LambdaMemory", self.lambda_memory.to_string()),
            ("EnableTracing", self.tracing.to_string()),
            ("LogRetentionDays", self.log_retention_days.to_string()),
            ("SnapshotWindows", windows.join(",")),
            ("UsageRetentionDays", self.usage_retention_days.to_string()),
            ("AuditRetentionDays", self.audit_retention_days.to_string()),
            ("EnableAuditArchival", self.audit_archival.to_string()),
            ("AuditArchiveGlacierDays", self.audit_archive_glacier_days.to_string()),
            ("EnableAlarms", self.alarms.to_string()),
            ("AlarmTopicArn", text(&self.alarm_sns_topic)),
            ("DurationAlarmMillis", alarming.to_string()),
            ("EnableIam", (self.iam != Iam::None).to_string()),
            ("EnableIamRoles", (self.iam == Iam::Roles).to_string()),
            ("PermissionBoundary", boundary_arn),
            ("PermissionBoundaryName", boundary_name),
            ("RoleNamePrefix", self.role_names.prefix().to_owned()),
            ("RoleNameSuffix", self.role_names.suffix().to_owned()),
            ("PolicyNamePrefix", self.policy_names.prefix().to_owned()),
            ("PolicyNameSuffix", self.policy_names.suffix().to_owned()),
        ];
        all.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }
}

fn projection(index: ResourceIndex) -> &'static str {
    match index {
        ResourceIndex::KeysOnly => "KEYS_ONLY",
        ResourceIndex::All => "ALL",
    }
}
