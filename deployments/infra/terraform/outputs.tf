locals {
  # R2 takes a token's id as the access key id, and the SHA-256 of its value as the secret.
  credentials = {
    for name, token in cloudflare_account_token.bucket : name => {
      access_key_id     = token.id
      secret_access_key = sha256(token.value)
    }
  }

  # As `millrace setup` reads it: a bucket bound to a jurisdiction has it after its account.
  account = var.jurisdiction == "default" ? var.account_id : "${var.account_id}.${var.jurisdiction}"

  variables = merge([
    for role, bucket in cloudflare_r2_bucket.role : {
      "R2_${upper(role)}_ACCOUNT_ID"              = local.account
      "R2_${upper(role)}_BUCKET_NAME"             = bucket.name
      "R2_${upper(role)}_READ_ACCESS_KEY_ID"      = local.credentials["${role}-read"].access_key_id
      "R2_${upper(role)}_READ_SECRET_ACCESS_KEY"  = local.credentials["${role}-read"].secret_access_key
      "R2_${upper(role)}_WRITE_ACCESS_KEY_ID"     = local.credentials["${role}-write"].access_key_id
      "R2_${upper(role)}_WRITE_SECRET_ACCESS_KEY" = local.credentials["${role}-write"].secret_access_key
    }
  ]...)
}

output "credentials" {
  description = "The key pair of each bucket and right, such as dataset-read."
  value       = local.credentials
  sensitive   = true
}

output "variables" {
  description = "What `millrace setup` reads, name by name."
  value       = local.variables
  sensitive   = true
}

output "env" {
  description = "The same as lines for a .env file: terraform output -raw env >> .env"
  value       = join("", [for name, value in local.variables : "${name}=${value}\n"])
  sensitive   = true
}
