/* next_program.c - whether RTLD_NEXT of another library goes on behind that library (next.c). */
int next_value(void);

int main(void)
{
    return next_value() != 11;
}
