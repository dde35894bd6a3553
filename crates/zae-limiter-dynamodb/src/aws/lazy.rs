//! A table that connects, and is checked, when it is first used.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use aws_config::identity::IdentityCache;
use aws_config::{BehaviorVersion, Region, SdkConfig};
use aws_credential_types::provider::SharedCredentialsProvider;
use aws_sdk_dynamodb::Client;
use aws_sdk_dynamodb::config::retry::RetryConfig;
use aws_sdk_dynamodb::config::timeout::TimeoutConfig;
use aws_smithy_http_client::{Builder, tls};
use tokio::sync::OnceCell;
use zae_limiter_core::{BoxFuture, Clock, SystemClock};
use zae_limiter_schema::records::Version;
use zae_limiter_schema::{
    BatchRead, BucketItemKey, Change, Consistency, Consumed, Decoded, Index, ItemKey, Query,
    QueryOutput, Scanned, Table, TableError, TableErrorKind, TableTime, Transacted, Update,
    Updated,
};

use super::credentials::OfProfile;
use super::detached::{Detached, DetachedCredentials};
use super::endpoints;
use super::profiles::BadProfile;
use super::retries::{ANSWER_TIMEOUT, CONNECT_TIMEOUT};
use super::{AwsTable, table_error};

/// How long a call waits for credentials. Less than the store's limit for opening (5 s), so that the error names what
/// does not answer. Loading continues meanwhile.
const CREDENTIALS_TIMEOUT: Duration = Duration::from_secs(4);

/// The address of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DynamoAddress {
    /// The name of the table.
    pub table: String,
    /// The AWS region; without it, the one of the environment or the profile.
    pub region: Option<String>,
    /// The URL of the endpoint, if it is not AWS's own.
    pub endpoint: Option<String>,
}

impl DynamoAddress {
    fn is_on_this_machine(&self) -> bool {
        let host = self.endpoint.as_deref().and_then(|url| url.split_once("://")).map(|all| all.1);
        let local = ["127.0.0.1", "localhost", "[::1]"];
        host.is_some_and(|host| local.iter().any(|name| host.starts_with(name)))
    }

    /// A client for this address, with credentials from the environment, a profile, or the machine.
    pub async fn client(&self) -> Client {
        let config = aws_sdk_dynamodb::config::Builder::from(&self.config().await);
        let timeouts = TimeoutConfig::builder()
            .connect_timeout(CONNECT_TIMEOUT)
            .read_timeout(ANSWER_TIMEOUT)
            .build();
        Client::from_conf(config.timeout_config(timeouts).build())
    }

    /// As [`client`](Self::client), but a whole call ends within `limit`: credentials, retries, and the
    /// transfer of the answer included.
    pub async fn client_within(&self, limit: Duration) -> Client {
        let timeouts = TimeoutConfig::builder()
            .connect_timeout(CONNECT_TIMEOUT)
            .read_timeout(ANSWER_TIMEOUT)
            .operation_timeout(limit)
            .build();
        let config = self.client().await.config().to_builder().timeout_config(timeouts);
        Client::from_conf(config.build())
    }

    /// As [`config`](Self::config), but a whole call ends within `limit`: credentials, retries, and the
    /// transfer of the answer included.
    pub async fn config_within(&self, limit: Duration) -> SdkConfig {
        let timeouts = TimeoutConfig::builder()
            .connect_timeout(CONNECT_TIMEOUT)
            .operation_timeout(limit)
            .build();
        self.config().await.into_builder().timeout_config(timeouts).build()
    }

    /// The configuration for clients of other AWS services at this address.
    pub async fn config(&self) -> SdkConfig {
        let http = Builder::new()
            .tls_provider(tls::Provider::Rustls(tls::rustls_provider::CryptoMode::Ring))
            .build_https();
        let timeouts = TimeoutConfig::builder().connect_timeout(CONNECT_TIMEOUT).build();
        let mut loader = aws_config::defaults(BehaviorVersion::latest())
            .http_client(http)
            .timeout_config(timeouts)
            .identity_cache(IdentityCache::lazy().load_timeout(CREDENTIALS_TIMEOUT).build());
        // An empty variable counts as unset, but the SDK takes it as the name of a region.
        let var = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        let named = |name| var(name).is_some();
        let region = self.region.clone().or_else(|| var("AWS_REGION"));
        if let Some(region) = region.or_else(|| var("AWS_DEFAULT_REGION")) {
            loader = loader.region(Region::new(region));
        }
        if self.is_on_this_machine() {
            // A local endpoint needs no credentials, but the SDK does.
            if !named("AWS_ACCESS_KEY_ID") && !named("AWS_PROFILE") {
                loader = loader.credentials_provider(local_credentials());
            }
            if self.region.is_none() && !named("AWS_REGION") && !named("AWS_DEFAULT_REGION") {
                loader = loader.region(Region::new("us-east-1"));
            }
        }
        if let Some(endpoint) = &self.endpoint {
            loader = loader.endpoint_url(endpoint);
        }
        // Calls for credentials keep the SDK's retries.
        let config = endpoints::without_empty(loader.load().await);
        let mut config = config.into_builder().retry_config(RetryConfig::disabled()).build();
        if config.region().is_some_and(|region| region.as_ref().is_empty()) {
            config = config.into_builder().region(None).build();
        }
        let Some(credentials) = config.credentials_provider() else { return config };
        let credentials = SharedCredentialsProvider::new(OfProfile(credentials));
        let credentials = SharedCredentialsProvider::new(DetachedCredentials::new(credentials));
        config.into_builder().credentials_provider(credentials).build()
    }
}

fn local_credentials() -> aws_credential_types::Credentials {
    aws_credential_types::Credentials::new("local", "local", None, None, "local")
}

/// A table that connects when it is first used, and is checked then: its keys, its indexes, and the release of
/// its format.
///
/// A caller that gives up during the check cancels it, and the next caller starts again over another
/// connection. Loading region and credentials continues without callers: on some machines it takes longer than
/// a caller waits.
pub struct LazyTable {
    name: String,
    source: ClientSource,
    /// Its own clock: a pause must end also without a connection.
    clock: Arc<dyn Clock>,
    loading: Detached<(Client, Option<BadProfile>)>,
    /// Kept between checks, with the credentials that it has loaded.
    client: OnceCell<Client>,
    table: OnceCell<AwsTable>,
}

/// Where the client comes from.
enum ClientSource {
    Address(DynamoAddress),
    User(Client),
}

// By hand: a client shows all of its settings.
impl fmt::Debug for LazyTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LazyTable").field("name", &self.name).finish_non_exhaustive()
    }
}

impl LazyTable {
    /// The table at this address, with credentials from the environment, a profile, or the machine.
    pub fn new(address: DynamoAddress) -> Self {
        Self::from_source(address.table.clone(), ClientSource::Address(address))
    }

    /// The table of this name, through a client that the program has built. See
    /// [`DynamoStore::from_client`](crate::DynamoStore::from_client).
    pub fn from_client(client: Client, table: impl Into<String>) -> Self {
        Self::from_source(table.into(), ClientSource::User(client))
    }

    fn from_source(name: String, source: ClientSource) -> Self {
        Self {
            name,
            source,
            clock: Arc::new(SystemClock),
            loading: Detached::default(),
            client: OnceCell::new(),
            table: OnceCell::new(),
        }
    }

    async fn client(&self) -> Result<&Client, TableError> {
        self.client
            .get_or_try_init(|| async {
                let (client, bad, advice) = match &self.source {
                    ClientSource::User(client) => (client.clone(), None, "set one on the client"),
                    ClientSource::Address(address) => {
                        let address = address.clone();
                        // Boxed: it is rare and large, and would be part of every call's future.
                        let load =
                            Box::pin(
                                async move { (address.client().await, BadProfile::find().await) },
                            );
                        let (client, bad) = self.loading.run(load).await;
                        (client, bad, "give one with the address, or set AWS_REGION")
                    }
                };
                if client.config().region().is_none() {
                    if let Some(bad) = bad {
                        return Err(TableError::new(TableErrorKind::Denied, bad.to_string()));
                    }
                    let message = format!("no AWS region is set; {advice}");
                    return Err(TableError::new(TableErrorKind::Rejected, message));
                }
                Ok(client)
            })
            .await
    }

    async fn table(&self) -> Result<&AwsTable, TableError> {
        self.table
            .get_or_try_init(|| async {
                let client = self.client().await?.clone();
                let table = AwsTable::new(client, &self.name, Arc::clone(&self.clock));
                check(&table).await?;
                check_version(&table).await?;
                Ok(table)
            })
            .await
    }
}

/// Checks that the keys and indexes are a limiter's.
async fn check(table: &AwsTable) -> Result<(), TableError> {
    let name = table.name();
    let description = table
        .client
        .describe_table()
        .table_name(name)
        .customize()
        .config_override(table.settings.with_retries())
        .send()
        .await;
    let description = match description {
        Ok(description) => description.table,
        Err(error) => {
            let error = table_error(name, error);
            // A role that may only acquire has no permission to describe the table.
            return match error.kind {
                TableErrorKind::Denied if error.message.contains("permission") => Ok(()),
                _ => Err(error),
            };
        }
    };
    let Some(table) = description else { return Ok(()) };
    let has_keys = |schema: Option<&[aws_sdk_dynamodb::types::KeySchemaElement]>, pk, sk| {
        let names: Vec<&str> =
            schema.unwrap_or_default().iter().map(|key| key.attribute_name()).collect();
        names == [pk, sk]
    };
    if !has_keys(table.key_schema.as_deref(), "PK", "SK") {
        let message = format!(
            "table {name} is not a limiter's: its keys are not PK and SK; use another table"
        );
        return Err(TableError::new(TableErrorKind::Incompatible, message));
    }
    let indexes = table.global_secondary_indexes.unwrap_or_default();
    for wanted in Index::ALL {
        let found = indexes.iter().find(|index| index.index_name() == Some(wanted.name()));
        let fits = found
            .is_some_and(|index| has_keys(index.key_schema.as_deref(), wanted.pk(), wanted.sk()));
        if !fits {
            let message = format!(
                "table {name} has no index {} on {} and {}; create it, or use another table",
                wanted.name(),
                wanted.pk(),
                wanted.sk()
            );
            return Err(TableError::new(TableErrorKind::Incompatible, message));
        }
    }
    Ok(())
}

/// Checks that the table's format is not of a later release. A table without a version record is fine.
async fn check_version(table: &AwsTable) -> Result<(), TableError> {
    let read = table.read(&[ItemKey::version()], Consistency::Eventual).await;
    let item = match read {
        Ok(read) => read.items.into_iter().next(),
        // A role bound to a namespace has no permission to read the table's own records.
        Err(error) if error.kind == TableErrorKind::Denied => return Ok(()),
        Err(error) => return Err(error),
    };
    let Some(item) = item else { return Ok(()) };
    let name = table.name();
    let incompatible = |message| TableError::new(TableErrorKind::Incompatible, message);
    let version = Version::decode(&item).map_err(|malformed| {
        incompatible(format!("table {name} has an invalid version record: {malformed}"))
    })?;
    if release(&version.schema) > release(Version::SCHEMA) {
        return Err(incompatible(format!(
            "table {name} is in format {}, of a later release than this program's {}; \
             upgrade this program",
            version.schema,
            Version::SCHEMA
        )));
    }
    Ok(())
}

/// Major and minor: a patch release is compatible.
fn release(version: &str) -> (u64, u64) {
    let mut numbers = version.split('.').map(|part| part.parse().unwrap_or(u64::MAX));
    (numbers.next().unwrap_or(u64::MAX), numbers.next().unwrap_or(u64::MAX))
}

impl Table for LazyTable {
    fn update<'a>(&'a self, update: &'a Update) -> BoxFuture<'a, Result<Updated, TableError>> {
        Box::pin(async move { self.table().await?.update(update).await })
    }

    fn update_bucket<'a>(
        &'a self,
        key: &'a BucketItemKey,
        update: Update,
    ) -> BoxFuture<'a, Result<Updated<Decoded>, TableError>> {
        Box::pin(async move { self.table().await?.update_bucket_once(key, &update).await })
    }

    fn transact<'a>(
        &'a self,
        changes: &'a [Change],
    ) -> BoxFuture<'a, Result<Transacted, TableError>> {
        Box::pin(async move { self.table().await?.transact(changes).await })
    }

    fn read<'a>(
        &'a self,
        keys: &'a [ItemKey],
        consistency: Consistency,
    ) -> BoxFuture<'a, Result<BatchRead, TableError>> {
        Box::pin(async move { self.table().await?.read(keys, consistency).await })
    }

    fn query<'a>(&'a self, query: &'a Query) -> BoxFuture<'a, Result<QueryOutput, TableError>> {
        Box::pin(async move { self.table().await?.query(query).await })
    }

    fn scan<'a>(
        &'a self,
        after: Option<&'a ItemKey>,
        limit: usize,
    ) -> BoxFuture<'a, Result<Scanned, TableError>> {
        Box::pin(async move { self.table().await?.scan(after, limit).await })
    }

    fn delete<'a>(&'a self, keys: &'a [ItemKey]) -> BoxFuture<'a, Result<Consumed, TableError>> {
        Box::pin(async move { self.table().await?.delete(keys).await })
    }

    /// The checks that come before the first call bring it.
    fn time(&self) -> TableTime {
        self.table.get().map_or(TableTime::NotYet, |table| table.time())
    }

    fn pause(&self, wait: Duration) -> BoxFuture<'_, ()> {
        self.clock.sleep(wait)
    }
}
